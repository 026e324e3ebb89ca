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
const STACK_BYTES: usize = 512 << 10;
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

/// Transfers that hold a thread of their own for as long as their client takes.
const TRANSFERS: usize = 16;
static TRANSFER_SLOTS: Semaphore = Semaphore::const_new(TRANSFERS);

/// Runs `work` on a thread of its own, not the pool's: it may wait for a slow client. Its result comes through the receiver.
///
/// Errors: 503 `busy` after a minute without a turn, or when no thread can be made.
pub async fn transfer<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<tokio::sync::oneshot::Receiver<T>, ApiError> {
    let busy = || {
        ApiError::new(503, "busy", "too many transfers are running already")
            .hint("try again when they have ended")
            .retryable()
    };
    let turn = match tokio::time::timeout(TURN, TRANSFER_SLOTS.acquire()).await {
        Ok(Ok(turn)) => turn,
        _ => return Err(busy()),
    };
    let (done, result) = tokio::sync::oneshot::channel();
    let thread = std::thread::Builder::new().name("transfer".to_owned()).stack_size(STACK_BYTES);
    let spawned = thread.spawn(move || {
        let _turn = turn;
        // A client that left asks for no result.
        let _ = done.send(work());
    });
    spawned.map(|_| result).map_err(|_| busy())
}
