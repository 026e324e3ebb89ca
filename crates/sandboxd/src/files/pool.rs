//! Disk work, off the daemon's one thread.
//!
//! The pool behind it is small (see `start`), so that a long job never keeps short ones waiting: a walk of a tree holds a
//! thread for as long as it takes, and only so many run at once; the chunks of a transfer take a thread for one read or
//! write each, and never while their client is slow.

use std::time::Duration;

use sandmill_wire::ApiError;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Walks of trees (list, remove, tar, recursive chmod) at once.
const WALKS: usize = 4;
/// How long a walk waits for its turn.
const TURN: Duration = Duration::from_secs(60);
static WALK_SLOTS: Semaphore = Semaphore::const_new(WALKS);

/// Runs short disk work on the pool. Cancelling leaves it to end by itself.
pub async fn short<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| ApiError::new(500, "internal", format!("the file call failed inside the daemon: {error}")))
}

/// The right to hold a thread for long. Errors: 503 `busy` after a minute.
pub async fn turn() -> Result<SemaphorePermit<'static>, ApiError> {
    match tokio::time::timeout(TURN, WALK_SLOTS.acquire()).await {
        Ok(Ok(permit)) => Ok(permit),
        _ => Err(ApiError::new(503, "busy", format!("{WALKS} long file calls are running already"))
            .hint("try again when they have ended")
            .retryable()),
    }
}

/// Runs a walk of a tree on the pool, in its turn.
pub async fn long<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    let turn = turn().await?;
    short(move || {
        // Held by the work itself: a client that leaves doesn't end it.
        let _turn = turn;
        work()
    })
    .await
}
