//! How a process ended.

use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Reason {
    /// It ended by itself with an exit code.
    Exited,
    /// A signal ended it that this daemon did not send for a timeout or a kill.
    Signaled,
    /// The call's time was over.
    Timeout,
    /// A kill call, or the client of an exec left.
    Killed,
    /// The sandbox's memory limit was reached and the kernel ended it.
    Oom,
}

/// What a process and the children that it waited for consumed. None where it isn't known: of a session's command only the
/// CPU time is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct CallUsage {
    pub cpu_s: f64,
    pub memory_peak_bytes: Option<u64>,
    pub io_read_bytes: Option<u64>,
    pub io_write_bytes: Option<u64>,
}

/// The end of a process. A code that isn't known is None, never 0.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    pub pid: u32,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub reason: Reason,
    pub duration_s: f64,
    pub usage: CallUsage,
}
