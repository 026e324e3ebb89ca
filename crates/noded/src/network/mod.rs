//! Network of sandboxes with mode `all`. (Contract for the rest of noded; see ARCHITECTURE.md.)

use std::net::Ipv4Addr;

/// The network of one sandbox, as its create has set it up.
#[derive(Debug, Clone)]
pub struct Attached {
    pub ip: Ipv4Addr,
    /// Goes into the sandbox's /etc/resolv.conf.
    pub dns: Ipv4Addr,
}
