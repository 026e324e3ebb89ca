//! Life of a sandbox.
//!
//! # Layout
//! - `spec`, `info`: what is asked for and what is answered.
//! - `node`: the registry: who exists, in which phase, and every call on them.
//! - `build`: the blocking path of a create, from the record on disk to a ready sandboxd, and its undoing.
//! - `teardown`: the blocking path of an end.
//! - `adopt`: a restarted noded finds its sandboxes again.
//! - `warm`: sandboxes made ahead of the next create that is like the last.
//! - `record`: a sandbox's state on disk. `slots`: ranges of ids.
//! - `lease`: the sweep over what exists. `events`, `ended`: what the outside learns of ends.
//! - `talk`: questions to a sandboxd.
//!
//! Phases: `Starting` (also while it waits for admission), `Running`, `Ending`, `Gone` or `Failed`. Only `node` moves a
//! sandbox between them, under one watch channel, so the first cause of an end wins and everyone else waits for it.

mod adopt;
mod build;
mod ended;
mod events;
mod info;
mod lease;
mod node;
mod record;
mod slots;
mod spec;
mod talk;
mod teardown;
mod warm;

pub use info::Cause;
pub use node::{Node, Options};
pub use spec::SandboxSpec;

use std::time::{SystemTime, UNIX_EPOCH};

/// Unix time in seconds, for people; nothing is decided by it.
fn unix_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
