//! A reader of a process's output.

use std::{cell::Cell, rc::Rc};

use bytes::Bytes;

use super::{outcome::Outcome, output::Stream, process::Process};

/// Most bytes in one [`Event::Output`].
const CHUNK_LIMIT_BYTES: usize = 64 << 10;

/// Byte offsets to read from. A terminal's only stream counts as stdout.
#[derive(Debug, Clone, Copy, Default)]
pub struct Offsets {
    pub stdout: u64,
    pub stderr: u64,
}

#[derive(Debug, Clone)]
pub enum Event {
    /// Bytes of one stream; `offset` is that of the first one.
    Output { stream: Stream, offset: u64, data: Bytes },
    /// `missing` bytes from `offset` on are no longer kept: this reader came late or fell behind.
    Gap { stream: Stream, offset: u64, missing: u64 },
    /// The process ended and all of its output was given. The last event.
    End(Outcome),
}

/// A position in a process's output. Dropping it ends the reading, nothing else.
pub struct Subscription {
    process: Rc<Process>,
    next: [u64; 2],
    ended: bool,
    /// Where the process looks how far this reader is, if it waits for it.
    paced: Option<Rc<Cell<[u64; 2]>>>,
}

impl Subscription {
    pub(super) fn new(process: Rc<Process>, from: Offsets, paced: Option<Rc<Cell<[u64; 2]>>>) -> Self {
        Self { process, next: [from.stdout, from.stderr], ended: false, paced }
    }

    /// The next event, waiting for it; None after [`Event::End`]. Cancel safe.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            if self.ended {
                return None;
            }
            // The wait must be armed before the look, else what comes between both is missed.
            let process = Rc::clone(&self.process);
            let changed = process.changed.notified();
            if let Some(event) = self.next_nowait() {
                return Some(event);
            }
            changed.await;
        }
    }

    /// The next event if it is there already.
    pub fn next_nowait(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        // Looked at first: output that comes before the end must be given before it.
        let outcome = self.process.outcome();
        for index in 0..2 {
            let Some((stream, total)) = self.process.stream_total(index) else { continue };
            if self.next[index] >= total {
                continue;
            }
            let (offset, data) = self.process.read_output(index, self.next[index], CHUNK_LIMIT_BYTES);
            if offset > self.next[index] {
                let missing = offset - self.next[index];
                let from = std::mem::replace(&mut self.next[index], offset);
                return Some(Event::Gap { stream, offset: from, missing });
            }
            self.next[index] += data.len() as u64;
            if let Some(position) = &self.paced {
                position.set(self.next);
                self.process.read_on.notify_waiters();
            }
            return Some(Event::Output { stream, offset, data: data.into() });
        }
        let outcome = outcome?;
        self.ended = true;
        Some(Event::End(outcome))
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if self.paced.take().is_some() {
            self.process.read_on.notify_waiters();
        }
    }
}
