//! The data gateway: one TCP listener in front of every sandbox; see `docs/reference/protocols.md`, section 4.
//!
//! # Layout
//! - `server`: the accept loop, limits on connections, shutting down.
//! - `client`: a client's connection: deadlines for slow heads and idleness.
//! - `target`: which sandbox and port a request is for.
//! - `token`: who may ask.
//! - `proxy`: one request: checks, forwarding, upgrades.
//! - `headers`: what is not passed on, and CORS.
//! - `upstream`: connections to sandboxes; `pool` keeps them and counts who is in use.
//! - `attach`: handing a client's connection over to sandboxd, so that no hop is left.
//! - `reply`: answers of the gateway's own, and the body of answers that pass through.
//!
//! Nothing here waits without a deadline, except for a sandbox's answer, which takes as long as the user's command: that
//! wait ends when the client leaves or the sandbox ends.

mod attach;
mod client;
mod headers;
mod pool;
mod proxy;
mod reply;
mod server;
mod target;
#[cfg(test)]
mod tests;
mod token;
mod upstream;

use std::path::PathBuf;

pub use server::serve;

/// Where a sandbox's data goes.
#[derive(Debug, Clone)]
pub struct Route {
    /// `sandboxd.sock` of the sandbox.
    pub socket: PathBuf,
    /// Its access token.
    pub token: String,
}

/// What the gateway needs to know of the sandboxes; the registry implements it. No call blocks.
pub trait Directory: Send + Sync + 'static {
    fn route(&self, id: &str) -> Option<Route>;
    /// Why a sandbox that is not there has ended (SandboxEnd as JSON), if that is known.
    fn ended(&self, id: &str) -> Option<serde_json::Value>;
    /// A request for this sandbox began or ended, or is still open: renews its lease.
    fn touch(&self, id: &str);
}
