//! The data gateway. (Contract for the rest of noded; see ARCHITECTURE.md.)

use std::path::PathBuf;

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
    /// A request for this sandbox began or ended: renews its lease.
    fn touch(&self, id: &str);
}
