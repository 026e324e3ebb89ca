//! Images from registries.
//!
//! - `reference`: names, as Docker reads them.
//! - `endpoints`: mirrors, other locations, insecure registries (`registries.conf`).
//! - `credentials`: Docker's and Podman's logins.
//! - `client`: requests, tokens, tries again. `refusal`: what can come back instead.
//! - `source`: an image as `source::oci` reads it; downloads that go on after a cut.
//! - `pulls`: one pull for all who ask, its progress and its end.

mod client;
mod credentials;
mod endpoints;
mod progress;
mod pulls;
mod reference;
mod refusal;
mod source;

pub use client::Client;
pub use credentials::Credentials;
pub use pulls::{Pulling, Pulls, Work};
pub use reference::Reference;
pub use refusal::Refusal;
pub use source::Source;
