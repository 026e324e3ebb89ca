//! Sessions: shells whose directory, environment, functions and jobs last between commands.

pub mod calls;

/// The sessions of the sandbox.
#[derive(Default)]
pub struct Sessions {}
