//! The ends of sandboxes as a numbered sequence, for a long poll.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use serde::Serialize;
use tokio::sync::watch;

use super::info::SandboxEnd;

/// Events kept; a reader that falls behind further compares lists instead (`GET /v1/sandboxes`).
const KEPT: usize = 10_000;

#[derive(Debug, Clone, Serialize)]
pub struct Event {
    pub seq: u64,
    pub kind: &'static str,
    pub sandbox: SandboxEnd,
}

pub struct Events {
    kept: Mutex<VecDeque<Event>>,
    /// Number of the latest event.
    latest: watch::Sender<u64>,
}

impl Events {
    /// Numbers go up over restarts, too, since they begin with the time in milliseconds.
    pub fn new() -> Self {
        Self { kept: Mutex::default(), latest: watch::channel((super::unix_now() * 1000.0) as u64).0 }
    }

    pub fn ended(&self, sandbox: SandboxEnd) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let seq = *self.latest.borrow() + 1;
        kept.push_back(Event { seq, kind: "ended", sandbox });
        if kept.len() > KEPT {
            kept.pop_front();
        }
        self.latest.send_replace(seq);
    }

    /// Events after `after`, as soon as there are any, and what to ask for next; nothing after `wait`.
    pub async fn after(&self, after: u64, wait: Duration) -> (Vec<Event>, u64) {
        let mut latest = self.latest.subscribe();
        let news = latest.wait_for(|seq| *seq > after);
        if after > 0 {
            let _ = tokio::time::timeout(wait, news).await;
        }
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let events: Vec<Event> = kept.iter().filter(|event| event.seq > after).cloned().collect();
        (events, *self.latest.borrow())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Cause;

    fn end(id: &str) -> SandboxEnd {
        SandboxEnd {
            id: id.to_owned(),
            cause: Cause::Killed,
            message: String::new(),
            ended_at: 0.0,
            exit_status: None,
            memory_peak_bytes: None,
        }
    }

    #[tokio::test]
    async fn each_is_seen_once() {
        let events = Events::new();
        let (none, next) = events.after(0, Duration::ZERO).await;
        assert!(none.is_empty());
        events.ended(end("a"));
        events.ended(end("b"));
        let (seen, next) = events.after(next, Duration::ZERO).await;
        assert_eq!(seen.iter().map(|event| event.sandbox.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        let wait = events.after(next, Duration::from_secs(5));
        let ((seen, _), ()) = tokio::join!(wait, async { events.ended(end("c")) });
        assert_eq!(seen.len(), 1);
    }
}
