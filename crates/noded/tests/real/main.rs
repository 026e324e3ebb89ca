//! The real binaries on a real kernel: needs root, and a built sandboxd beside noded (or in `SANDMILL_SANDBOXD`).
//!
//! - `bench`: a noded of its own for each test, and the smallest HTTP client that does.
//! - `lifecycle`, `isolation`, `limits`, `crashes`: what the names say.

mod bench;
mod crashes;
mod isolation;
mod lifecycle;
mod limits;
mod warm;
