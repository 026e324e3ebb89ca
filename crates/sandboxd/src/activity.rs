//! Whether the sandbox is in use: leases that renew on use are decided on this.

use std::{cell::Cell, rc::Rc, time::Instant};

use serde::Serialize;

/// Counts calls that are running and remembers when the last one began or ended.
#[derive(Clone)]
pub struct Activity(Rc<State>);

struct State {
    running: Cell<u64>,
    last: Cell<Instant>,
}

/// One running call; the call ends when this is dropped.
pub struct Running(Rc<State>);

#[derive(Serialize)]
pub struct Report {
    /// Seconds since the last call began or ended.
    pub idle_s: f64,
    /// Calls that are running now.
    pub running: u64,
}

impl Activity {
    pub fn new() -> Self {
        Self(Rc::new(State { running: Cell::new(0), last: Cell::new(Instant::now()) }))
    }

    pub fn begin(&self) -> Running {
        self.0.running.set(self.0.running.get() + 1);
        self.0.last.set(Instant::now());
        Running(Rc::clone(&self.0))
    }

    pub fn report(&self) -> Report {
        Report { idle_s: self.0.last.get().elapsed().as_secs_f64(), running: self.0.running.get() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.set(self.0.running.get() - 1);
        self.0.last.set(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_counts_until_it_is_dropped() {
        let activity = Activity::new();
        let call = activity.begin();
        assert_eq!(activity.report().running, 1);
        drop(call);
        assert_eq!(activity.report().running, 0);
    }
}
