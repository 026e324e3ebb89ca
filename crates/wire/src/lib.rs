//! Types that cross the process boundary between noded and sandboxd, and the one error shape of the wire.
//!
//! The contract in prose is `docs/reference/protocols.md`.

mod config;
mod error;

pub use config::{
    DropTo, LeaseTerms, SandboxdConfig, CGROUP_FD, CONFIG_FD, HANDOVER, LISTEN_FD, READY_FD, TETHER, TETHER_FD,
};
pub use error::ApiError;
