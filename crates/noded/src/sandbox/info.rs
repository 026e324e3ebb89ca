//! What is said about a sandbox.

use std::{collections::BTreeMap, net::Ipv4Addr};

use serde::{Deserialize, Serialize};

use super::spec::NetworkMode;

#[derive(Debug, Clone, Serialize)]
pub struct SandboxInfo {
    pub id: String,
    pub state: &'static str,
    /// Id of the image.
    pub image: String,
    /// Unix seconds, like all times here.
    pub created_at: f64,
    pub started_at: f64,
    pub expires_at: f64,
    /// Host pid of sandboxd.
    pub pid: i32,
    pub limits: EnforcedLimits,
    pub network: NetworkInfo,
    pub env: BTreeMap<String, String>,
    pub workdir: Option<String>,
    pub user: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EnforcedLimits {
    pub cpu: Option<f64>,
    pub memory_bytes: Option<u64>,
    pub pids: Option<u64>,
    pub disk_bytes: Option<u64>,
    pub inodes: Option<u64>,
    pub shm_bytes: u64,
    /// What enforces each: cpu, memory, pids, disk, inodes.
    pub enforced_by: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Serialize)]
pub struct NetworkInfo {
    pub mode: NetworkMode,
    pub ip: Option<Ipv4Addr>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    Killed,
    LeaseExpired,
    Oom,
    Crashed,
    NodeRestarted,
    Committed,
}

impl Cause {
    pub const ALL: [Self; 6] =
        [Self::Killed, Self::LeaseExpired, Self::Oom, Self::Crashed, Self::NodeRestarted, Self::Committed];

    /// As JSON says it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::LeaseExpired => "lease_expired",
            Self::Oom => "oom",
            Self::Crashed => "crashed",
            Self::NodeRestarted => "node_restarted",
            Self::Committed => "committed",
        }
    }

    /// A cause that a caller may give.
    pub fn asked(name: &str) -> Option<Self> {
        match name {
            "killed" => Some(Self::Killed),
            "lease_expired" => Some(Self::LeaseExpired),
            _ => None,
        }
    }

    /// In words.
    pub fn message(self) -> &'static str {
        match self {
            Self::Killed => "it was killed by a call",
            Self::LeaseExpired => "its lease ran out: nobody used or renewed it",
            Self::Oom => "the kernel killed its daemon because the memory limit was reached",
            Self::Crashed => "its daemon ended by itself",
            Self::NodeRestarted => "the machine was restarted",
            Self::Committed => "it was committed: its changes are an image now",
        }
    }
}

/// Why a sandbox is gone; kept for an hour.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SandboxEnd {
    pub id: String,
    pub cause: Cause,
    pub message: String,
    pub ended_at: f64,
    /// As a shell says it (128 + signal); null where nobody could see it.
    pub exit_status: Option<i32>,
    pub memory_peak_bytes: Option<u64>,
}

#[derive(Debug, Clone, Default, Serialize)]
pub struct Usage {
    pub cpu_s: f64,
    pub memory_bytes: u64,
    pub memory_peak_bytes: u64,
    pub memory_limit_bytes: Option<u64>,
    pub pids: u64,
    pub io_read_bytes: u64,
    pub io_write_bytes: u64,
    pub disk_bytes: Option<u64>,
    pub disk_limit_bytes: Option<u64>,
    pub oom_kills: u64,
    pub at: f64,
}
