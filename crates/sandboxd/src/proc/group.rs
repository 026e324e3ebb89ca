//! Kill groups: everything that one call started, whoever it re-parented or called setsid.

use std::{
    cell::{Cell, RefCell},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    rc::Rc,
    time::{Duration, Instant},
};

use rustix::{
    fs::{AtFlags, Mode, OFlags},
    io::Errno,
};

use super::fallback;
use crate::sys;

/// How long a kill may take before it is given up: a process in an uninterruptible wait can't be killed by anyone.
const KILL_DEADLINE: Duration = Duration::from_secs(10);

/// Makes groups: in the cgroup tree that noded delegated, or by marker and descent where there is none.
pub struct Groups {
    tree: Option<OwnedFd>,
    next: Cell<u64>,
    /// Groups whose call is over and which still hold processes.
    left: RefCell<Vec<Rc<Group>>>,
    /// Empty ones to use again: making and removing one costs as much as a tenth of a spawn.
    spare: RefCell<Vec<Cgroup>>,
    nonce: String,
}

/// Most empty groups that are kept.
const SPARE_LIMIT: usize = 4;

pub struct Group {
    kind: Kind,
}

enum Kind {
    Cgroup(RefCell<Option<Cgroup>>),
    /// The value of [`fallback::MARKER`] in the environment of the call's processes, and its leader once it is known.
    Marked {
        nonce: String,
        leader: Cell<Option<u32>>,
    },
}

struct Cgroup {
    name: String,
    directory: OwnedFd,
    events: OwnedFd,
    /// It was killed once. Linux (6.18 at least) then kills whatever is cloned into it later, since the clone compares the
    /// group's kill count with that of the group it came from: such a group is never used again.
    killed: Cell<bool>,
}

impl Groups {
    /// `tree`: fd 4 as noded gave it, which is /dev/null where there is no delegated cgroup.
    pub fn new(tree: Option<OwnedFd>) -> Self {
        let mut groups = Self {
            tree: None,
            next: Cell::new(1),
            left: RefCell::default(),
            spare: RefCell::default(),
            nonce: nonce(),
        };
        // The first call's group shows whether the tree can be used at all.
        if let Some(tree) = tree {
            if let Ok(first) = groups.make_cgroup(&tree) {
                groups.spare.get_mut().push(first);
                groups.tree = Some(tree);
            }
        }
        groups
    }

    /// The delegated directory of the sandbox, if there is one.
    pub fn tree(&self) -> Option<BorrowedFd<'_>> {
        self.tree.as_ref().map(AsFd::as_fd)
    }

    /// A new, empty group.
    pub fn make(&self) -> io::Result<Rc<Group>> {
        let kind = match &self.tree {
            Some(tree) => {
                let spare = self.spare.borrow_mut().pop();
                let cgroup = spare.map_or_else(|| self.make_cgroup(tree), Ok)?;
                Kind::Cgroup(RefCell::new(Some(cgroup)))
            }
            None => Kind::Marked { nonce: format!("{}-{}", self.nonce, self.number()), leader: Cell::new(None) },
        };
        Ok(Rc::new(Group { kind }))
    }

    fn make_cgroup(&self, tree: &OwnedFd) -> io::Result<Cgroup> {
        loop {
            match Cgroup::make(tree, format!("c{}", self.number())) {
                // An earlier daemon's, with processes that live on.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                made => return made,
            }
        }
    }

    fn number(&self) -> u64 {
        let number = self.next.get();
        self.next.set(number + 1);
        number
    }

    /// Kills what calls that are over have left running.
    pub fn kill_left(&self) {
        for group in self.left.borrow().iter() {
            group.kill_nowait();
        }
    }

    /// Removes the empty groups; for the daemon's own end.
    pub fn clear(&self) {
        self.sweep();
        if let Some(tree) = &self.tree {
            for cgroup in self.spare.borrow_mut().drain(..) {
                let _ = rustix::fs::unlinkat(tree, cgroup.name.as_str(), AtFlags::REMOVEDIR);
            }
        }
    }

    /// The call of `group` is over: an empty group goes, one with processes that live on goes when the last has ended.
    pub fn release(&self, group: &Rc<Group>) {
        if !self.try_remove(group) {
            self.left.borrow_mut().push(Rc::clone(group));
        }
    }

    /// Removes the groups whose last process has ended since.
    pub fn sweep(&self) {
        let mut left = std::mem::take(&mut *self.left.borrow_mut());
        left.retain(|group| !self.try_remove(group));
        self.left.borrow_mut().extend(left);
    }

    /// Whether there are groups of finished calls that still hold processes.
    pub fn has_left(&self) -> bool {
        !self.left.borrow().is_empty()
    }

    fn try_remove(&self, group: &Group) -> bool {
        let Kind::Cgroup(slot) = &group.kind else { return true };
        let mut slot = slot.borrow_mut();
        let Some(cgroup) = slot.take_if(|cgroup| !cgroup.populated()) else { return slot.is_none() };
        let mut spare = self.spare.borrow_mut();
        if spare.len() < SPARE_LIMIT && !cgroup.killed.get() {
            spare.push(cgroup);
        } else if let Some(tree) = &self.tree {
            let _ = rustix::fs::unlinkat(tree, cgroup.name.as_str(), AtFlags::REMOVEDIR);
        }
        true
    }
}

impl Group {
    /// Runs `with` with the cgroup that a new member is born into.
    pub fn with_cgroup<T>(&self, with: impl FnOnce(Option<BorrowedFd<'_>>) -> T) -> T {
        match &self.kind {
            Kind::Cgroup(slot) => with(slot.borrow().as_ref().map(|cgroup| cgroup.directory.as_fd())),
            Kind::Marked { .. } => with(None),
        }
    }

    /// What the environment of the call's processes must hold.
    pub fn marker(&self) -> Option<&str> {
        match &self.kind {
            Kind::Cgroup(_) => None,
            Kind::Marked { nonce, .. } => Some(nonce),
        }
    }

    /// Says which process leads the group.
    pub fn lead(&self, pid: u32) {
        if let Kind::Marked { leader, .. } = &self.kind {
            leader.set(Some(pid));
        }
    }

    /// The leader has been reaped: its pid can mean another process from now on.
    pub fn leader_gone(&self) {
        if let Kind::Marked { leader, .. } = &self.kind {
            leader.set(None);
        }
    }

    /// The processes in the group now.
    pub fn members(&self) -> Vec<u32> {
        match &self.kind {
            Kind::Cgroup(slot) => slot.borrow().as_ref().map_or_else(Vec::new, Cgroup::members),
            Kind::Marked { nonce, leader } => fallback::members(nonce, leader.get()),
        }
    }

    /// Sends `signal` to every process in the group.
    pub fn signal(&self, signal: i32) {
        for pid in self.members() {
            // One that ended meanwhile has had what it needs.
            let _ = sys::send(pid, signal);
        }
    }

    /// Kills every process in the group; the call returns before they are gone.
    pub fn kill_nowait(&self) {
        match &self.kind {
            Kind::Cgroup(slot) => {
                if let Some(cgroup) = &*slot.borrow() {
                    cgroup.kill();
                }
            }
            Kind::Marked { nonce, leader } => fallback::kill(nonce, leader.get()),
        }
    }

    /// Kills every process in the group until none is left. False when some could not be killed in ten seconds.
    pub async fn kill(&self) -> bool {
        let deadline = Instant::now() + KILL_DEADLINE;
        let mut pause = Duration::from_micros(200);
        loop {
            self.kill_nowait();
            if self.is_empty() {
                return true;
            }
            if Instant::now() > deadline {
                return false;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    fn is_empty(&self) -> bool {
        match &self.kind {
            Kind::Cgroup(slot) => !slot.borrow().as_ref().is_some_and(Cgroup::populated),
            Kind::Marked { nonce, leader } => fallback::members(nonce, leader.get()).is_empty(),
        }
    }
}

impl Cgroup {
    fn make(tree: &OwnedFd, name: String) -> io::Result<Self> {
        let mode = Mode::from_raw_mode(0o755);
        if let Err(error) = rustix::fs::mkdirat(tree, name.as_str(), mode) {
            if error != Errno::EXIST {
                return Err(error.into());
            }
            // Left by an earlier daemon, and perhaps killed once: see `killed`.
            rustix::fs::unlinkat(tree, name.as_str(), AtFlags::REMOVEDIR)?;
            rustix::fs::mkdirat(tree, name.as_str(), mode)?;
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(tree, name.as_str(), flags | OFlags::DIRECTORY, Mode::empty())?;
        let events = rustix::fs::openat(&directory, "cgroup.events", flags, Mode::empty())?;
        Ok(Self { name, directory, events, killed: Cell::new(false) })
    }

    fn populated(&self) -> bool {
        let mut text = [0; 64];
        let count = rustix::io::pread(&self.events, &mut text, 0).unwrap_or(0);
        // A group that can't be read any more has been removed, by noded.
        text[..count].windows(11).any(|window| window == b"populated 1")
    }

    fn kill(&self) {
        self.killed.set(true);
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let written = rustix::fs::openat(&self.directory, "cgroup.kill", flags, Mode::empty())
            .and_then(|file| rustix::io::write(file, b"1"));
        if written.is_err() {
            // Before Linux 5.14: one by one; the caller repeats until none is left.
            for pid in self.members() {
                let _ = sys::send(pid, libc::SIGKILL);
            }
        }
    }

    fn members(&self) -> Vec<u32> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::openat(&self.directory, "cgroup.procs", flags, Mode::empty()) else {
            return Vec::new();
        };
        let text = io::read_to_string(std::fs::File::from(file)).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid != 0).collect()
    }
}

/// Sixteen hex digits that tell this daemon's calls from those of others on the same machine.
fn nonce() -> String {
    let mut bytes = [0_u8; 8];
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
