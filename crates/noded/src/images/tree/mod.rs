//! Work on whole trees on disk, whoever made them: hostile depth, names and links included.
//!
//! Everything goes through directory descriptors and never follows a link, so a tree cannot lead out of itself.

mod remove;

pub use remove::remove;
