//! The system calls that no safe crate wraps. All `unsafe` of this crate is here.

mod filter;
mod identity;
mod signals;
mod spawn;
mod wait;
mod watch;

pub use filter::{deny_clone3, Secret};
pub use identity::as_user;
pub use signals::{close_on_exec, prepare, send, Signals};
pub use spawn::{Child, Failure, Identity, Spawner, Step};
pub use wait::{consumed, reap_one, Ended};
pub use watch::{watch, watch_signals};
