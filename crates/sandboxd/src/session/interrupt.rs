//! Which processes a session's command started.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    os::unix::fs::FileExt as _,
};

use crate::proc::{now_ticks, Process, Stat};

/// What stood when a command began: it is not the command's, and outlives its timeout.
#[derive(Default)]
pub struct Before {
    /// The shell's children: its background jobs.
    jobs: HashSet<u32>,
    began_ticks: u64,
}

impl Before {
    /// `children`: the shell's /proc/PID/task/PID/children.
    pub fn now(children: Option<&File>) -> Self {
        let mut text = [0; 4096];
        let count = children.and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
        let jobs = std::str::from_utf8(&text[..count]).unwrap_or("").split_ascii_whitespace();
        Self { jobs: jobs.filter_map(|pid| pid.parse().ok()).collect(), began_ticks: now_ticks() }
    }

    /// The living processes of the session that the command started: those that began since, and are neither the shell nor
    /// descend from an earlier background job.
    pub fn started_since(&self, shell: &Process) -> Vec<u32> {
        let members = shell.group().members();
        let stats: HashMap<u32, Stat> = members.into_iter().filter_map(|pid| Some((pid, Stat::of(pid)?))).collect();
        choose(&stats, shell.pid(), &self.jobs, self.began_ticks)
    }
}

fn choose(stats: &HashMap<u32, Stat>, shell: u32, jobs: &HashSet<u32>, began_ticks: u64) -> Vec<u32> {
    let of_earlier_job = |pid: u32| {
        let mut at = pid;
        // Bounded by the number of processes: parents are read one after the other and may have changed meanwhile.
        for _ in 0..stats.len() {
            if jobs.contains(&at) {
                return true;
            }
            match stats.get(&at) {
                Some(stat) if at != shell => at = stat.parent,
                _ => return false,
            }
        }
        false
    };
    let fits = |pid: u32, stat: &Stat| {
        pid != shell && !stat.zombie && stat.started_ticks >= began_ticks && !of_earlier_job(pid)
    };
    stats.iter().filter(|(pid, stat)| fits(**pid, stat)).map(|(pid, _)| *pid).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_s_own_are_chosen() {
        let stat =
            |parent, started_ticks, zombie| Stat { parent, zombie, cpu_ticks: 0, tree_cpu_ticks: 0, started_ticks };
        let stats = HashMap::from([
            (10, stat(1, 5, false)),   // the shell
            (11, stat(10, 6, false)),  // an earlier job
            (12, stat(11, 60, false)), // what it starts now
            (13, stat(10, 50, false)), // the command
            (14, stat(13, 51, false)), // its child
            (15, stat(1, 52, false)),  // its daemon
            (16, stat(1, 7, false)),   // an earlier daemon
            (17, stat(13, 53, true)),  // dead already
        ]);
        let mut chosen = choose(&stats, 10, &HashSet::from([11]), 50);
        chosen.sort_unstable();
        assert_eq!(chosen, [13, 14, 15]);
    }
}
