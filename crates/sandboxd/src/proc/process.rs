//! One process that a call started.

use std::{
    cell::{Cell, RefCell},
    fs::File,
    io::{self, Write as _},
    rc::{Rc, Weak},
    time::{Duration, Instant},
};

use rustix::termios::Winsize;
use sandmill_wire::ApiError;
use tokio::{
    io::{unix::AsyncFd, Interest},
    sync::Notify,
};

use super::{
    command::Size,
    group::Group,
    outcome::{Outcome, Reason},
    output::{Cut, Keep, Kept, Stream},
    pump,
    subscription::{Offsets, Subscription},
};
use crate::sys::{self, Ended};

/// Room that pacing leaves for what one read brings and for what is in a full pipe at the end.
const PIPE_ROOM_BYTES: usize = 256 << 10;

/// A process, its output and its stdin; see [`super`] for the rules.
pub struct Process {
    pid: u32,
    pub(super) about: About,
    pub(super) group: Rc<Group>,
    /// stdout (or the terminal) and stderr.
    kept: [RefCell<Kept>; 2],
    keep: Keep,
    /// Our side of its output; gone once the outcome is out.
    outputs: RefCell<Outputs>,
    stdin: RefCell<Option<Rc<AsyncFd<File>>>>,
    /// The terminal's master side.
    terminal: Option<Rc<AsyncFd<File>>>,
    ended: Cell<Option<Ended>>,
    /// Why this daemon ended it, if it did.
    ending: Cell<Option<Reason>>,
    outcome: RefCell<Option<Outcome>>,
    /// Output came, or the outcome is known.
    pub(super) changed: Notify,
    /// The leader was reaped.
    pub(super) reaped: Notify,
    /// Positions of readers that the process must not run away from.
    paced: RefCell<Vec<Weak<Cell<[u64; 2]>>>>,
    /// One of them came, read on or left, or pacing is over.
    pub(super) read_on: Notify,
}

/// What is known about a process from its start on.
#[derive(Debug, Clone)]
pub struct About {
    pub argv: Vec<String>,
    pub cwd: String,
    pub tag: Option<String>,
    /// Unix time.
    pub started_at: f64,
    pub started: Instant,
    /// Out-of-memory kills that the kernel had counted at the start.
    pub(super) oom_kills: Option<u64>,
}

/// Our side of a process's standard streams.
pub struct Ends {
    pub outputs: Outputs,
    pub stdin: Option<Rc<AsyncFd<File>>>,
    /// The terminal's master side, which is the first output too.
    pub terminal: Option<Rc<AsyncFd<File>>>,
}

/// The read sides of a process's output; with a terminal only the first.
pub type Outputs = [Option<Rc<AsyncFd<File>>>; 2];

impl Process {
    pub(super) fn new(pid: u32, about: About, group: Rc<Group>, keep: Keep, ends: Ends) -> Self {
        let Ends { outputs, stdin, terminal } = ends;
        Self {
            pid,
            about,
            group,
            kept: [RefCell::new(Kept::new(keep)), RefCell::new(Kept::new(keep))],
            keep,
            outputs: RefCell::new(outputs),
            stdin: RefCell::new(stdin),
            terminal,
            ended: Cell::new(None),
            ending: Cell::new(None),
            outcome: RefCell::new(None),
            changed: Notify::new(),
            reaped: Notify::new(),
            paced: RefCell::default(),
            read_on: Notify::new(),
        }
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    pub fn about(&self) -> &About {
        &self.about
    }

    /// The kill group that it leads.
    pub fn group(&self) -> &Group {
        &self.group
    }

    pub fn has_terminal(&self) -> bool {
        self.terminal.is_some()
    }

    /// How it ended; None while it runs.
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome.borrow().clone()
    }

    /// Waits for the outcome, which is known once the process ended and what was in its pipes is read. Cancel safe.
    pub async fn wait(&self) -> Outcome {
        loop {
            let changed = self.changed.notified();
            if let Some(outcome) = self.outcome() {
                return outcome;
            }
            changed.await;
        }
    }

    /// Reads the output from `from` on; see [`Subscription::next`].
    pub fn subscribe(self: &Rc<Self>, from: Offsets) -> Subscription {
        Subscription::new(Rc::clone(self), from, None)
    }

    /// As [`Process::subscribe`], for a reader that must get all: while it is behind by nearly what is kept, the output
    /// stays in the pipe, and the process waits for it. Dropping the subscription, and the leader's end, end that.
    pub fn subscribe_paced(self: &Rc<Self>, from: Offsets) -> Subscription {
        let position = Rc::new(Cell::new([from.stdout, from.stderr]));
        let mut paced = self.paced.borrow_mut();
        paced.retain(|position| position.strong_count() > 0);
        paced.push(Rc::downgrade(&position));
        drop(paced);
        self.read_on.notify_waiters();
        Subscription::new(Rc::clone(self), from, Some(position))
    }

    /// Waits until it has that many paced readers, or needs none since it ended. Cancel safe.
    pub async fn wait_for_paced_readers(&self, count: usize) {
        loop {
            let changed = self.read_on.notified();
            let readers = self.paced.borrow().iter().filter(|position| position.strong_count() > 0).count();
            if readers >= count || self.outcome().is_some() {
                return;
            }
            changed.await;
        }
    }

    /// Where new output will begin.
    pub fn offsets(&self) -> Offsets {
        let total = |index: usize| self.kept[index].borrow().total();
        Offsets { stdout: total(0), stderr: total(1) }
    }

    /// Whether the stream at `index` has more unread output than a paced reader can catch up with.
    pub(super) fn runs_away(&self, index: usize) -> bool {
        // What is in the pipe when the leader ends fits into what is left of the limit.
        if self.ended.get().is_some() || self.ending.get().is_some() {
            return false;
        }
        let Keep::Latest(limit) = self.keep else { return false };
        let slowest = self.paced.borrow().iter().filter_map(|position| Some(position.upgrade()?.get()[index])).min();
        let total = self.kept[index].borrow().total();
        slowest.is_some_and(|position| total.saturating_sub(position) > limit.saturating_sub(PIPE_ROOM_BYTES) as u64)
    }

    /// Writes all of `data` to stdin, or types it at the terminal; waits while the pipe is full. Cancelling it leaves a part
    /// written.
    ///
    /// Errors: 409 `stdin_closed` when stdin was not kept open, was closed, or the process closed its side or ended.
    pub async fn write_stdin(&self, data: &[u8]) -> Result<(), ApiError> {
        let Some(stdin) = self.stdin.borrow().clone() else { return Err(self.stdin_closed()) };
        let mut left = data;
        while !left.is_empty() {
            let write = stdin.async_io(Interest::WRITABLE, |mut file| file.write(left));
            let written = tokio::select! {
                biased;
                written = write => written.map_err(|_| self.stdin_closed())?,
                // A full pipe that a background process holds open would never say that the process is gone.
                _ = self.wait() => return Err(self.stdin_closed()),
            };
            left = &left[written..];
        }
        Ok(())
    }

    /// Ends stdin: the process reads the end of the file. At a terminal, types the end-of-file character. Idempotent.
    pub async fn close_stdin(&self) -> Result<(), ApiError> {
        if self.has_terminal() {
            return self.write_stdin(&[self.end_of_file()]).await;
        }
        self.stdin.borrow_mut().take();
        Ok(())
    }

    /// The terminal's end-of-file character, which programs may change.
    fn end_of_file(&self) -> u8 {
        let attributes = self.terminal.as_ref().and_then(|master| rustix::termios::tcgetattr(master.get_ref()).ok());
        attributes.map_or(4, |attributes| attributes.special_codes[rustix::termios::SpecialCodeIndex::VEOF])
    }

    fn stdin_closed(&self) -> ApiError {
        ApiError::new(409, "stdin_closed", format!("process {} takes no input", self.pid))
            .hint("start it with keep_stdin, and write before it ends or closes its stdin")
    }

    /// Sends a signal to the process, or with `tree` to everything that it started.
    ///
    /// Errors: 400 `invalid_argument` for a number that is no signal; 409 `process_ended`.
    pub fn signal(&self, signal: i32, tree: bool) -> Result<(), ApiError> {
        if !(0..=64).contains(&signal) {
            return Err(super::prepare::invalid(format!("{signal} is not a signal: they go from 1 to 64")));
        }
        if tree {
            self.group.signal(signal);
            return Ok(());
        }
        // Only this thread reaps: a process that isn't marked as ended still owns its pid.
        if self.ended.get().is_some() {
            return Err(self.process_ended());
        }
        sys::send(self.pid, signal)
            .map_err(|error| ApiError::new(500, "signal_failed", format!("process {}: {error}", self.pid)))
    }

    fn process_ended(&self) -> ApiError {
        ApiError::new(409, "process_ended", format!("process {} has ended", self.pid))
    }

    /// Sets the terminal's size.
    ///
    /// Errors: 409 `no_terminal`; 409 `process_ended`.
    pub fn resize(&self, size: Size) -> Result<(), ApiError> {
        let Some(master) = &self.terminal else {
            return Err(ApiError::new(409, "no_terminal", format!("process {} was started without a pty", self.pid)));
        };
        if self.ended.get().is_some() {
            return Err(self.process_ended());
        }
        set_size(master.get_ref(), size).map_err(|_| self.process_ended())
    }

    /// Ends everything that the process started, and gives its outcome.
    pub async fn kill(&self) -> Outcome {
        self.end(Reason::Killed).await;
        self.wait().await
    }

    /// Kills the group for `why`; returns when nothing of it is left.
    pub async fn end(&self, why: Reason) {
        if self.ended.get().is_none() && self.ending.get().is_none() {
            self.ending.set(Some(why));
            self.read_on.notify_waiters();
        }
        if !self.group.kill().await {
            eprintln!("sandboxd: process {}: some of what it started can't be killed", self.pid);
        }
    }

    /// Bytes that the stream at `index` has had, and which one it is; None for a terminal's second.
    pub(super) fn stream_total(&self, index: usize) -> Option<(Stream, u64)> {
        let stream = match (index, self.has_terminal()) {
            (0, false) => Stream::Stdout,
            (1, false) => Stream::Stderr,
            (0, true) => Stream::Pty,
            _ => return None,
        };
        Some((stream, self.kept[index].borrow().total()))
    }

    pub(super) fn read_output(&self, index: usize, offset: u64, limit: usize) -> (u64, Vec<u8>) {
        self.kept[index].borrow().read(offset, limit)
    }

    /// Reads what is in the pipes now.
    pub fn drain_nowait(&self) {
        let outputs = self.outputs.borrow().clone();
        for (index, output) in outputs.iter().enumerate() {
            let Some(output) = output else { continue };
            while pump::read_into(self, index, output.get_ref()).is_ok_and(|count| count > 0) {}
        }
    }

    /// Begins to keep output anew; what is kept so far comes first.
    pub fn restart_output(&self, keep: Keep) {
        for kept in &self.kept {
            let (so_far, _) = kept.replace(Kept::new(keep)).take();
            kept.borrow_mut().push(&so_far);
        }
    }

    /// Takes what is kept of the stream at `index`.
    pub fn take_output(&self, index: usize) -> (Vec<u8>, Option<Cut>) {
        self.kept[index].borrow_mut().take()
    }

    /// Adds output, unless the outcome is out: a background process writes on then, and nobody has asked for it.
    pub(super) fn push(&self, index: usize, data: &[u8]) {
        if self.outcome.borrow().is_none() {
            self.kept[index].borrow_mut().push(data);
            self.changed.notify_waiters();
        }
    }

    /// The reaper found that the leader ended.
    pub(super) fn leader_ended(&self, ended: Ended) {
        self.ended.set(Some(ended));
        self.group.leader_gone();
        self.reaped.notify_waiters();
        self.read_on.notify_waiters();
    }

    pub(super) fn ended(&self) -> Option<Ended> {
        self.ended.get()
    }

    pub(super) fn ending(&self) -> Option<Reason> {
        self.ending.get()
    }

    /// Publishes the outcome.
    pub(super) fn conclude(&self, outcome: Outcome) {
        self.stdin.borrow_mut().take();
        *self.outputs.borrow_mut() = [None, None];
        *self.outcome.borrow_mut() = Some(outcome);
        if self.is_replayable() {
            for kept in &self.kept {
                kept.borrow_mut().shrink();
            }
        }
        self.changed.notify_waiters();
    }

    /// Whether its output can be asked for later; an exec's is given with its result, once.
    pub(super) fn is_replayable(&self) -> bool {
        matches!(self.keep, Keep::Latest(_))
    }

    /// Memory that the kept output takes, in bytes.
    pub(super) fn kept_bytes(&self) -> usize {
        self.kept.iter().map(|kept| kept.borrow().size()).sum()
    }

    pub(super) fn age(&self) -> Duration {
        self.about.started.elapsed()
    }
}

pub(super) fn set_size(master: &File, size: Size) -> io::Result<()> {
    let size = Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(rustix::termios::tcsetwinsize(master, size)?)
}
