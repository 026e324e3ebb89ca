//! noded, the host's agent.
//!
//! # Layout
//! - `control`: the control API over `DIR/noded.sock` (routes only; each area answers its own).
//! - `sandbox`: life of a sandbox: registry, create, delete, re-adoption, leases, ends.
//! - `isolation`: namespaces, mounts, cgroups, seccomp: the only unsafe code that touches the kernel's isolation.
//! - `images`: the content-addressed layer store, imports, the `host` image, commits.
//! - `network`: veth, NAT, DNS for sandboxes with network `all`.
//! - `gateway`: the data path: routing by header or host name, tokens, handing over connections.

mod gateway;
mod images;
mod network;

fn main() {}
