//! The table: who runs, who ended lately, and the reaper.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, VecDeque},
    fs::File,
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    rc::Rc,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use rustix::{
    fs::{Mode, OFlags},
    pipe::PipeFlags,
    pty::OpenptFlags,
};
use sandmill_wire::{ApiError, SandboxdConfig};
use tokio::io::{unix::AsyncFd, Interest};

use super::{
    accounts::{Account, Accounts},
    command::{Command, Options, Size, Stdin},
    fallback,
    group::{Group, Groups},
    oom,
    prepare::{self, Prepared},
    process::{set_size, About, Ends, Process},
    pump,
};
use crate::sys::{self, Child, Ended, Failure, Identity, Secret, Signals, Spawner, Step};

/// Processes that ended and can still be asked about, at most.
const ENDED_LIMIT: usize = 256;
/// Kept output of processes that ended, at most.
const ENDED_BYTES_LIMIT: usize = 8 << 20;

/// What a table needs and what is the same whoever this sandbox will belong to.
pub struct Means {
    accounts: Accounts,
    groups: Groups,
    spawner: Spawner,
}

impl Means {
    /// `tree`: the delegated cgroup directory, if noded gave one. `secret`: of the filter that denies clone3.
    pub fn gather(tree: Option<OwnedFd>, secret: Secret) -> Self {
        Self { accounts: Accounts::default(), groups: Groups::new(tree), spawner: Spawner::new(secret) }
    }

    /// Looks at what nearly every first call looks at, so that the kernel has found it in the image's layers by then.
    pub fn preheat(&self) {
        let _ = self.accounts.resolve("root");
        for path in PREHEATED {
            let _ = rustix::fs::stat(path); // an image need not have it
        }
    }
}

/// The loader, the C library, shells: what a command's start walks through.
const PREHEATED: [&str; 12] = [
    "/root",
    "/dev/null",
    "/proc/self",
    "/bin/true",
    "/bin/sh",
    "/bin/bash",
    "/usr/bin/env",
    "/usr/bin/python3",
    "/etc/ld.so.preload",
    "/etc/ld.so.cache",
    "/lib64/ld-linux-x86-64.so.2",
    "/lib/x86_64-linux-gnu/libc.so.6",
];

/// All processes that calls started. Clones share the table.
#[derive(Clone)]
pub struct Table {
    shared: Rc<Shared>,
}

pub struct Shared {
    config: SandboxdConfig,
    pub accounts: Accounts,
    pub groups: Groups,
    spawner: RefCell<Spawner>,
    running: RefCell<HashMap<u32, Rc<Process>>>,
    /// The newest last.
    ended: RefCell<VecDeque<Rc<Process>>>,
    /// Orphans reaped so far: processes that no call started directly.
    orphans: Cell<u64>,
}

/// The child's side of its standard streams, and ours.
struct Streams {
    child: [OwnedFd; 3],
    ours: Ends,
}

impl Table {
    pub fn new(config: SandboxdConfig, means: Means) -> Self {
        Self {
            shared: Rc::new(Shared {
                config,
                accounts: means.accounts,
                groups: means.groups,
                spawner: RefCell::new(means.spawner),
                running: RefCell::default(),
                ended: RefCell::default(),
                orphans: Cell::new(0),
            }),
        }
    }

    pub fn accounts(&self) -> &Accounts {
        &self.shared.accounts
    }

    /// The delegated cgroup directory of this sandbox.
    pub fn groups(&self) -> &Groups {
        &self.shared.groups
    }

    /// Starts a process. It never awaits; the process runs its program when it returns.
    ///
    /// Errors: 400 `user_not_found`, `cwd_not_found`, `command_not_found`, `command_not_executable`, `shell_not_found`,
    /// `arguments_too_long`, `invalid_argument`; 503 `process_limit` and `out_of_resources` (retryable).
    pub fn start(&self, command: &Command, options: Options) -> Result<Rc<Process>, ApiError> {
        self.start_with(command, options, &[])
    }

    /// The account that `command` runs as. Errors: 400 `user_not_found`.
    pub fn account(&self, command: &Command) -> Result<Account, ApiError> {
        prepare::account(&self.shared.config, &self.shared.accounts, command)
    }

    /// As [`Table::start`], with more descriptors for the child: ours (numbered above theirs), and their numbers there.
    pub fn start_with(
        &self,
        command: &Command,
        options: Options,
        inherit: &[(&OwnedFd, i32)],
    ) -> Result<Rc<Process>, ApiError> {
        let shared = &self.shared;
        let group = shared.groups.make().map_err(|error| no_resources("making the call's cgroup", &error))?;
        match self.start_in(&group, command, options, inherit) {
            Ok(process) => Ok(process),
            Err(error) => {
                shared.groups.release(&group);
                Err(error)
            }
        }
    }

    fn start_in(
        &self,
        group: &Rc<Group>,
        command: &Command,
        options: Options,
        inherit: &[(&OwnedFd, i32)],
    ) -> Result<Rc<Process>, ApiError> {
        let shared = &self.shared;
        let mut extra = Vec::new();
        if options.pty.is_some() && !command.env.contains_key("TERM") {
            extra.push(("TERM", "xterm-256color"));
        }
        if let Some(marker) = group.marker() {
            extra.push((fallback::MARKER, marker));
        }
        let prepared = prepare::prepare(&shared.config, &shared.accounts, command, &extra)?;
        let streams = Streams::make(&options, &prepared).map_err(|error| no_resources("making its pipes", &error))?;
        let pid = shared.spawn(&prepared, &streams, options.pty.is_some(), group, inherit)?;
        group.lead(pid);
        let about = About {
            argv: prepared.shown,
            cwd: prepared.cwd_path,
            tag: options.tag,
            started_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()),
            started: Instant::now(),
            oom_kills: shared.config.memory_limit_bytes.and_then(|_| oom::kills(shared.groups.tree())),
        };
        let Streams { child, ours } = streams;
        drop(child);
        let outputs = ours.outputs.clone();
        let process = Rc::new(Process::new(pid, about, Rc::clone(group), options.keep, ours));
        shared.running.borrow_mut().insert(pid, Rc::clone(&process));
        let bytes = match options.stdin {
            Stdin::Bytes(bytes) => Some(bytes),
            Stdin::Null | Stdin::Open => None,
        };
        tokio::task::spawn_local(pump::run(Rc::clone(shared), Rc::clone(&process), outputs, bytes, options.timeout));
        Ok(process)
    }

    /// The process with this pid: one that runs, else the latest that ended.
    ///
    /// Errors: 404 `process_not_found`.
    pub fn get(&self, pid: u32) -> Result<Rc<Process>, ApiError> {
        self.find(|process| process.pid() == pid).ok_or_else(|| not_found(&format!("with pid {pid}")))
    }

    /// The process with this tag: one that runs, else the latest that ended.
    ///
    /// Errors: 404 `process_not_found`.
    pub fn by_tag(&self, tag: &str) -> Result<Rc<Process>, ApiError> {
        self.find(|process| process.about().tag.as_deref() == Some(tag))
            .ok_or_else(|| not_found(&format!("with the tag {tag:?}")))
    }

    fn find(&self, wanted: impl Fn(&Process) -> bool) -> Option<Rc<Process>> {
        let running = self.shared.running.borrow().values().find(|process| wanted(process)).cloned();
        running.or_else(|| self.shared.ended.borrow().iter().rev().find(|process| wanted(process)).cloned())
    }

    /// All that run, and the latest that ended, in the order of their start.
    pub fn list(&self) -> Vec<Rc<Process>> {
        let mut all: Vec<_> = self.shared.ended.borrow().iter().cloned().collect();
        all.extend(self.shared.running.borrow().values().cloned());
        all.sort_by_key(|process| process.about().started);
        all
    }

    /// Kills every process that a call started and removes its groups; for the daemon's own end.
    pub async fn shut_down(&self) {
        self.shared.groups.kill_left();
        let running: Vec<_> = self.shared.running.borrow().values().cloned().collect();
        for process in &running {
            process.group.kill_nowait();
        }
        for process in &running {
            process.group.kill().await;
            self.shared.groups.release(&process.group);
        }
        self.shared.groups.clear();
    }

    /// Reaps for ever, until a signal asks the daemon to stop.
    pub async fn reap(&self, signals: Signals) -> io::Result<()> {
        let signals = sys::watch_signals(signals)?;
        loop {
            let signal = signals.async_io(Interest::READABLE, Signals::next).await?;
            if signal != libc::SIGCHLD {
                return Ok(());
            }
            let mut orphans = false;
            while let Some(ended) = sys::reap_one(None) {
                orphans |= !self.shared.reaped(ended);
            }
            if orphans && self.shared.groups.has_left() {
                self.shared.groups.sweep();
            }
        }
    }
}

impl Shared {
    fn spawn(
        &self,
        prepared: &Prepared,
        streams: &Streams,
        terminal: bool,
        group: &Group,
        inherit: &[(&OwnedFd, i32)],
    ) -> Result<u32, ApiError> {
        let account = &prepared.account;
        let identity = Identity { uid: account.uid, gid: account.gid, groups: &account.groups };
        let same = account.uid == 0 && account.gid == 0 && account.groups.is_empty();
        let [stdin, stdout, stderr] = &streams.child;
        let inherit: Vec<_> = inherit.iter().map(|(fd, number)| (fd.as_raw_fd(), *number)).collect();
        let spawned = group.with_cgroup(|cgroup| {
            self.spawner.borrow_mut().spawn(&Child {
                path: &prepared.path,
                argv: &prepared.argv,
                env: &prepared.env,
                stdio: [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
                terminal,
                cwd: prepared.cwd.as_fd(),
                identity: (!same).then_some(identity),
                cgroup,
                inherit: &inherit,
            })
        });
        spawned.map_err(|failure| explain(&failure, prepared))
    }

    /// Books an ended child; false when no call started it directly.
    fn reaped(&self, ended: Ended) -> bool {
        let process = self.running.borrow().get(&ended.pid).cloned();
        match process {
            Some(process) if process.ended().is_none() => {
                process.leader_ended(ended);
                true
            }
            _ => {
                self.orphans.set(self.orphans.get() + 1);
                false
            }
        }
    }

    /// The outcome of `process` is out: it moves to those that ended. Execs, whose result was the answer, are not kept.
    pub(super) fn concluded(&self, process: &Rc<Process>) {
        self.running.borrow_mut().remove(&process.pid());
        self.groups.release(&process.group);
        let mut ended = self.ended.borrow_mut();
        if process.is_replayable() {
            ended.push_back(Rc::clone(process));
        }
        let mut kept: usize = ended.iter().map(|process| process.kept_bytes()).sum();
        while ended.len() > ENDED_LIMIT || (kept > ENDED_BYTES_LIMIT && ended.len() > 1) {
            let Some(oldest) = ended.pop_front() else { break };
            kept -= oldest.kept_bytes();
        }
    }
}

impl Streams {
    fn make(options: &Options, prepared: &Prepared) -> io::Result<Self> {
        match options.pty {
            Some(size) => Self::terminal(size, prepared),
            None => Self::pipes(&options.stdin, &prepared.account),
        }
    }

    fn pipes(stdin: &Stdin, account: &Account) -> io::Result<Self> {
        let (child_in, ours_in) = match stdin {
            Stdin::Null => (rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?, None),
            Stdin::Bytes(_) | Stdin::Open => {
                let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
                (read, Some(ours(write, Interest::WRITABLE)?))
            }
        };
        let (out_read, out_write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let (err_read, err_write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        if account.uid != 0 {
            // Else the user could not open them again, as /dev/stderr or /proc/self/fd/1.
            for fd in [&child_in, &out_write, &err_write] {
                give(fd, account);
            }
        }
        Ok(Self {
            child: [child_in, out_write, err_write],
            ours: Ends {
                outputs: [Some(ours(out_read, Interest::READABLE)?), Some(ours(err_read, Interest::READABLE)?)],
                stdin: ours_in,
                terminal: None,
            },
        })
    }

    fn terminal(size: Size, prepared: &Prepared) -> io::Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = rustix::pty::openpt(flags)?;
        rustix::pty::grantpt(&master)?;
        rustix::pty::unlockpt(&master)?;
        let name = rustix::pty::ptsname(&master, Vec::new())?;
        let slave = rustix::fs::open(&*name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?;
        // As login does: the user owns the terminal, so that it can be opened again by its name.
        give(&slave, &prepared.account);
        let _ = rustix::fs::fchmod(&slave, Mode::from_raw_mode(0o620));
        let master = ours(master, Interest::READABLE | Interest::WRITABLE)?;
        set_size(master.get_ref(), size)?;
        Ok(Self {
            child: [slave.try_clone()?, slave.try_clone()?, slave],
            ours: Ends {
                outputs: [Some(Rc::clone(&master)), None],
                stdin: Some(Rc::clone(&master)),
                terminal: Some(master),
            },
        })
    }
}

/// Makes the account the owner of a pipe or terminal. /dev/null stays what it is, and where a sandbox has no right to change
/// owners all its ids are one.
pub fn give(fd: &OwnedFd, account: &Account) {
    let kind = rustix::fs::fstat(fd).map(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode));
    let terminal = rustix::termios::isatty(fd);
    if terminal || kind == Ok(rustix::fs::FileType::Fifo) {
        let owner = (rustix::fs::Uid::from_raw(account.uid), rustix::fs::Gid::from_raw(account.gid));
        let _ = rustix::fs::fchown(fd, Some(owner.0), Some(owner.1));
    }
}

/// Our side of a pipe or terminal: non-blocking and watched.
fn ours(fd: OwnedFd, interest: Interest) -> io::Result<Rc<AsyncFd<File>>> {
    Ok(Rc::new(sys::watch(fd, interest)?))
}

fn not_found(which: &str) -> ApiError {
    ApiError::new(404, "process_not_found", format!("there is no process {which}"))
        .hint(format!("the latest {ENDED_LIMIT} that ended are kept; GET procs lists what there is"))
}

fn no_resources(what: &str, error: &io::Error) -> ApiError {
    ApiError::new(503, "out_of_resources", format!("the process could not be started ({what}): {error}"))
        .hint("end some processes of this sandbox, or raise its limits")
        .retryable()
}

fn explain(failure: &Failure, prepared: &Prepared) -> ApiError {
    let program = prepared.path.to_string_lossy();
    let error = &failure.error;
    match (failure.step, error.raw_os_error()) {
        (Step::Exec, Some(libc::ENOENT)) => {
            prepare::not_found(&program).hint("the file is there, but its interpreter or loader is not in the image")
        }
        (Step::Exec, Some(libc::E2BIG)) => ApiError::new(
            400,
            "arguments_too_long",
            "the arguments and the environment are longer than the kernel takes",
        )
        .hint("one string may have 128 KiB; pass long input as stdin or write it to a file"),
        (Step::Exec, Some(libc::ENOEXEC)) => {
            ApiError::new(400, "command_not_executable", format!("{program} has a format that can't be run here"))
                .hint("a script needs a first line like #!/bin/sh; a binary must be built for this machine")
        }
        (Step::Exec, Some(libc::ENOMEM)) => no_resources("running its program", error),
        (Step::Exec, _) => ApiError::new(400, "command_not_executable", format!("{program} can't be run: {error}"))
            .hint("is it executable for this user, and are its directories open to it?"),
        (Step::Cwd, _) => ApiError::new(
            400,
            "cwd_not_found",
            format!("the working directory {} can't be entered: {error}", prepared.cwd_path),
        ),
        (Step::Groups | Step::Gid | Step::Uid, _) => ApiError::new(
            400,
            "user_not_found",
            format!("the sandbox can't run as {}:{}: {error}", prepared.account.uid, prepared.account.gid),
        )
        .hint("a sandbox has the ids from 0 to 65535"),
        (Step::Clone, Some(libc::EAGAIN)) => {
            ApiError::new(503, "process_limit", "the sandbox has reached its limit of processes")
                .hint("end some, or create the sandbox with a higher pids limit")
                .retryable()
        }
        (step, _) => no_resources(&format!("{step:?}").to_lowercase(), error),
    }
}
