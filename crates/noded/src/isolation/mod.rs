//! The kernel's isolation: the only unsafe code of noded that touches it.
//!
//! - `mount`: the descriptor-based mount calls.
//! - `child`: what the new process does between clone and exec.
//! - `launch`: the parent's half: clone, id maps, overlays, waiting for readiness.
//! - `template`: the shared read-only /dev and /sys.
//! - `seccomp`: the filter; `syscalls`: the numbers it allows.
//! - `cgroup`: limits, accounts and kill groups on v1, hybrid and v2.
//! - `disk`: upper directories with a limit (btrfs quota groups, tmpfs).
//! - `process`: pidfds, start times, signals.
//! - `remove`: deletion of directory trees that a mapped root filled.

pub mod cgroup;
pub mod child;
mod clone;
pub mod disk;
pub mod launch;
pub mod mount;
pub mod process;
pub mod remove;
pub mod seccomp;
mod syscalls;
pub mod template;

use sandmill_wire::ApiError;

/// A step of making or removing a sandbox that the kernel refused.
#[derive(Debug)]
pub struct StepError {
    pub step: &'static str,
    pub source: std::io::Error,
}

impl StepError {
    pub fn at(step: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self { step, source }
    }
}

impl std::fmt::Display for StepError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.step, self.source)
    }
}

impl std::error::Error for StepError {}

impl From<StepError> for ApiError {
    fn from(error: StepError) -> Self {
        let exhausted = matches!(
            error.source.raw_os_error(),
            Some(libc::ENOSPC | libc::EAGAIN | libc::ENOMEM | libc::EMFILE | libc::ENFILE | libc::EDQUOT)
        );
        let api = Self::new(
            if exhausted { 503 } else { 500 },
            if exhausted { "node_exhausted" } else { "create_failed" },
            format!("the kernel refused a step of the create: {error}"),
        )
        .hint("run `sandmill doctor`: it names what this machine lacks or which limit is reached")
        .details(serde_json::json!({"step": error.step, "errno": error.source.raw_os_error()}));
        if exhausted {
            api.retryable()
        } else {
            api
        }
    }
}
