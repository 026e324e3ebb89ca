//! Which sandboxes are in use, and their idle connections.

use std::{
    collections::HashMap,
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Poll,
    time::{Duration, Instant},
};

use sandmill_wire::ApiError;

use super::{upstream::Link, Directory};

/// Idle connections kept for one sandbox, and for all of them.
const IDLE_PER_SANDBOX: usize = 16;
const IDLE_IN_ALL: usize = 2048;
/// How long an idle connection is kept.
const IDLE_FOR: Duration = Duration::from_secs(30);
/// Requests that one sandbox may have open through the gateway.
const REQUESTS_PER_SANDBOX: usize = 2048;
/// How often open requests renew their sandbox's lease, and old connections are dropped.
const ROUND: Duration = Duration::from_secs(5);

#[derive(Clone)]
pub struct Pool {
    directory: Arc<dyn Directory>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    sandboxes: HashMap<Arc<str>, Entry>,
    idle: usize,
}

#[derive(Default)]
struct Entry {
    open: usize,
    idle: Vec<(Link, Instant)>,
}

impl Pool {
    pub fn new(directory: Arc<dyn Directory>) -> Self {
        Self { directory, state: Arc::default() }
    }

    pub fn directory(&self) -> &dyn Directory {
        &*self.directory
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under this lock can panic half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request as open until the returned value is dropped. Errors: 503 `sandbox_busy`.
    pub fn begin(&self, id: &str) -> Result<InUse, ApiError> {
        let id: Arc<str> = id.into();
        {
            let mut state = self.lock();
            let entry = state.sandboxes.entry(Arc::clone(&id)).or_default();
            if entry.open >= REQUESTS_PER_SANDBOX {
                return Err(ApiError::new(
                    503,
                    "sandbox_busy",
                    format!("{REQUESTS_PER_SANDBOX} requests to this sandbox are open"),
                )
                .hint("let some of them end first")
                .retryable());
            }
            entry.open += 1;
        }
        self.directory.touch(&id);
        Ok(InUse { pool: self.clone(), id })
    }

    /// Renews the leases of sandboxes with open requests, and drops old connections; runs for ever.
    pub async fn keep_house(self) {
        let mut rounds = tokio::time::interval(ROUND);
        loop {
            rounds.tick().await;
            let (open, old) = self.round(Instant::now());
            drop(old);
            for id in open {
                self.directory.touch(&id);
            }
        }
    }

    fn round(&self, now: Instant) -> (Vec<Arc<str>>, Vec<(Link, Instant)>) {
        let mut state = self.lock();
        let mut old = Vec::new();
        let mut open = Vec::new();
        state.sandboxes.retain(|id, entry| {
            // The oldest come first.
            let until = entry.idle.iter().take_while(|(_, since)| now.duration_since(*since) >= IDLE_FOR).count();
            old.extend(entry.idle.drain(..until));
            if entry.open > 0 {
                open.push(Arc::clone(id));
            }
            entry.open > 0 || !entry.idle.is_empty()
        });
        state.idle -= old.len();
        (open, old)
    }

    fn take(&self, id: &str) -> Option<Link> {
        let mut state = self.lock();
        let (link, _) = state.sandboxes.get_mut(id)?.idle.pop()?;
        state.idle -= 1;
        Some(link)
    }
}

/// A request in progress; its end renews the lease.
pub struct InUse {
    pool: Pool,
    id: Arc<str>,
}

impl InUse {
    /// The idle connection that was used last, if one still stands.
    pub async fn idle_link(&self) -> Option<Link> {
        while let Some(mut link) = self.pool.take(&self.id) {
            if poll_fn(|cx| Poll::Ready(link.is_free(cx))).await {
                return Some(link);
            }
        }
        None
    }

    /// Keeps a connection for the next request.
    pub fn give_back(&self, link: Link) {
        let mut state = self.pool.lock();
        if state.idle >= IDLE_IN_ALL {
            return;
        }
        let Some(entry) = state.sandboxes.get_mut(&self.id) else { return };
        if entry.idle.len() < IDLE_PER_SANDBOX {
            entry.idle.push((link, Instant::now()));
            state.idle += 1;
        }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if let Some(entry) = self.pool.lock().sandboxes.get_mut(&self.id) {
            entry.open -= 1;
        }
        self.pool.directory.touch(&self.id);
    }
}
