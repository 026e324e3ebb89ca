//! The life of a process from its start to its outcome: its pipes are drained, its stdin fed, its time watched.

use std::{
    cell::RefCell,
    fs::File,
    future::{pending, Future},
    io::{self, Read as _},
    pin::pin,
    rc::Rc,
    time::Duration,
};

use bytes::Bytes;
use tokio::io::{unix::AsyncFd, Interest};

use super::{
    oom,
    outcome::{CallUsage, Outcome, Reason},
    process::{Outputs, Process},
    table::Shared,
};

/// How long after its process's end a pipe may stay open, because a background process or a process substitution holds
/// it, until the outcome no longer waits for it.
const DRAIN: Duration = Duration::from_millis(50);
/// Most bytes of one read: what a pipe holds.
const READ_SIZE_BYTES: usize = 64 << 10;
/// Reads in a row of one pipe before others have their turn.
const READS_IN_A_ROW: usize = 16;

/// Runs until the outcome of `process` is known and published.
pub async fn run(
    shared: Rc<Shared>,
    process: Rc<Process>,
    outputs: Outputs,
    stdin: Option<Bytes>,
    timeout: Option<Duration>,
) {
    let mut drained = Box::pin(drain(Rc::clone(&process), outputs));
    let mut draining = true;
    {
        let mut reaped = pin!(process.reaped.notified());
        let mut fed = pin!(feed(&process, stdin));
        let mut feeding = true;
        let mut late = pin!(expire(&process, timeout));
        let mut waiting = true;
        while process.ended().is_none() {
            tokio::select! {
                biased;
                () = &mut reaped => break,
                () = &mut drained, if draining => draining = false,
                () = &mut fed, if feeding => feeding = false,
                () = &mut late, if waiting => waiting = false,
            }
        }
    }
    if let Some(reason) = process.ending() {
        // The promise of a kill is about all processes of the call, not only its leader.
        process.end(reason).await;
    }
    if draining && tokio::time::timeout(DRAIN, &mut drained).await.is_ok() {
        draining = false;
    }
    process.conclude(outcome(&shared, &process));
    shared.concluded(&process);
    if draining {
        // What still holds the pipes was left running on purpose: it must neither block on them nor get SIGPIPE.
        drained.await;
    }
}

/// Kills the process's group when its time is over.
async fn expire(process: &Process, timeout: Option<Duration>) {
    match timeout {
        Some(timeout) => tokio::time::sleep(timeout).await,
        None => return pending().await,
    }
    process.end(Reason::Timeout).await;
}

async fn feed(process: &Process, stdin: Option<Bytes>) {
    if let Some(bytes) = stdin {
        // A process that doesn't read all of its input is no error.
        let _ = process.write_stdin(&bytes).await;
        let _ = process.close_stdin().await;
    }
}

/// Reads all outputs until each has ended.
async fn drain(process: Rc<Process>, outputs: Outputs) {
    let [first, second] = outputs;
    let second = drain_one(&process, 1, second);
    both(drain_one(&process, 0, first), second).await;
}

async fn drain_one(process: &Process, index: usize, file: Option<Rc<AsyncFd<File>>>) {
    let Some(file) = file else { return };
    loop {
        for _ in 0..READS_IN_A_ROW {
            wait_for_readers(process, index).await;
            match file.async_io(Interest::READABLE, |file| read_into(process, index, file)).await {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // EIO is how a terminal says that its last holder has gone.
                Err(_) => return,
            }
        }
        tokio::task::yield_now().await;
    }
}

/// Waits while a paced reader is too far behind.
async fn wait_for_readers(process: &Process, index: usize) {
    loop {
        let read_on = process.read_on.notified();
        if !process.runs_away(index) {
            return;
        }
        read_on.await;
    }
}

/// Reads once, through the one buffer that all processes share (nothing awaits while it is borrowed).
pub(super) fn read_into(process: &Process, index: usize, mut file: &File) -> io::Result<usize> {
    thread_local! {
        static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.is_empty() {
            *buffer = vec![0; READ_SIZE_BYTES];
        }
        let count = file.read(buffer)?;
        process.push(index, &buffer[..count]);
        Ok(count)
    })
}

async fn both(first: impl Future<Output = ()>, second: impl Future<Output = ()>) {
    let (mut first, mut second) = (pin!(first), pin!(second));
    let (mut one, mut two) = (false, false);
    while !(one && two) {
        tokio::select! {
            () = &mut first, if !one => one = true,
            () = &mut second, if !two => two = true,
        }
    }
}

fn outcome(shared: &Shared, process: &Process) -> Outcome {
    let ended = process.ended();
    let consumed = ended.map(|ended| ended.consumed).unwrap_or_default();
    let signal = ended.and_then(|ended| ended.signal);
    let exit_code = ended.and_then(|ended| ended.exit_code);
    let looks_like_oom = signal == Some(libc::SIGKILL) || exit_code == Some(128 + libc::SIGKILL);
    // Without a count from its start there is nothing to compare with, and no claim is made.
    let oom = || process.about().oom_kills.is_some_and(|before| oom::kills(shared.groups.tree()) > Some(before));
    let reason = match process.ending() {
        Some(reason) => reason,
        None if looks_like_oom && oom() => Reason::Oom,
        None if signal.is_some() => Reason::Signaled,
        None => Reason::Exited,
    };
    Outcome {
        pid: process.pid(),
        exit_code,
        signal,
        reason,
        duration_s: process.age().as_secs_f64(),
        usage: CallUsage {
            cpu_s: consumed.cpu_s,
            memory_peak_bytes: Some(consumed.memory_peak_bytes),
            io_read_bytes: Some(consumed.io_read_bytes),
            io_write_bytes: Some(consumed.io_write_bytes),
        },
    }
}
