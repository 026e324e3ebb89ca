//! HTTP/1.1 and h2c on unix sockets, TCP, and connections handed over by noded.
//!
//! `listen` (accept loops) → `handover` (the first bytes of a unix connection) → `connection` (HTTP) → `router`.

mod body;
mod codec;
mod connection;
mod handover;
mod listen;
mod query;
mod router;

pub use body::{collect, Reply, ReplyBody, Request};
pub use codec::{no_content, Blob, Format};
pub use listen::{tcp, unix};
pub use query::Query;
pub use router::unknown_call;

/// Where a connection comes from, which decides whether its calls must show the access token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// noded's socket, or a connection that noded handed over: the gateway has checked the token.
    Trusted,
    /// A TCP listener of our own (in a pod).
    Network,
}
