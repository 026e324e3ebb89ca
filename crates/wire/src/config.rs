//! What noded hands to sandboxd at its start.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Descriptor of the listening unix socket.
pub const LISTEN_FD: i32 = 3;
/// Descriptor of the sandbox's directory in the cgroup v2 tree, or of /dev/null.
pub const CGROUP_FD: i32 = 4;
/// Descriptor from which a [`SandboxdConfig`] is read as JSON to the end: a sealed memfd, or a pipe on which it comes later.
pub const CONFIG_FD: i32 = 5;
/// Descriptor of the pipe on which sandboxd writes one byte when it accepts connections.
pub const READY_FD: i32 = 6;
/// Descriptor of the reading end of a pipe that ends when noded does; the terms come with the configuration, as `lease`.
pub const TETHER_FD: i32 = 7;
/// First byte of a message on sandboxd's socket that hands over a client's connection (SCM_RIGHTS); then u32be length and
/// the bytes that were already read from the client.
pub const HANDOVER: u8 = 0x01;
/// First byte of a message that ties a sandbox to the next noded, or with other terms: then one byte (1: use renews the lease), the lease's length as f64be
/// seconds, and with them (SCM_RIGHTS) the reading end of a pipe that ends when noded does.
pub const TETHER: u8 = 0x02;

/// The configuration of one sandboxd; see `docs/reference/protocols.md` section 3.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SandboxdConfig {
    pub id: String,
    pub hostname: String,
    /// Access token, checked only on TCP listeners (behind noded the gateway checks it).
    pub token: Option<String>,
    /// Environment of the sandbox (over the image's).
    pub env: BTreeMap<String, String>,
    /// Environment of the image's configuration.
    pub image_env: BTreeMap<String, String>,
    /// Default working directory of calls; made if the image lacks it.
    pub workdir: Option<String>,
    /// Default user of calls: a name, a uid, or `uid:gid`; root when absent.
    pub user: Option<String>,
    pub memory_limit_bytes: Option<u64>,
    pub cpus: Option<f64>,
    pub pids: Option<u64>,
    /// The lease by which the sandbox ends itself when noded never comes back; None: never.
    pub lease: Option<LeaseTerms>,
    /// What a child gives up before its exec. Behind noded always the default: it is given up before the rest is known.
    pub drop_to: DropTo,
}

/// How long a sandbox may live without a noded.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LeaseTerms {
    pub ttl_s: f64,
    /// A call begins the lease anew.
    pub renew_on_use: bool,
}

/// What a user's process may keep.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub struct DropTo {
    /// Capabilities that stay in the bounding set, as a bit mask.
    pub bounding: u64,
    pub no_new_privs: bool,
    /// Answer clone3 with ENOSYS (libc then uses clone, whose flags the seccomp filter sees).
    pub deny_clone3: bool,
}

impl Default for DropTo {
    fn default() -> Self {
        Self { bounding: DOCKER_CAPABILITIES, no_new_privs: true, deny_clone3: true }
    }
}

/// Docker's fourteen default capabilities: CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP
/// NET_BIND_SERVICE SYS_CHROOT KILL AUDIT_WRITE.
pub const DOCKER_CAPABILITIES: u64 = 1 << 0
    | 1 << 1
    | 1 << 4
    | 1 << 3
    | 1 << 27
    | 1 << 13
    | 1 << 6
    | 1 << 7
    | 1 << 31
    | 1 << 8
    | 1 << 10
    | 1 << 18
    | 1 << 5
    | 1 << 29;
