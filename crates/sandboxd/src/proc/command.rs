//! What a caller asks to be run.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;

use super::output::Keep;

/// How much of each stream an exec gives back unless the call says otherwise.
pub const DEFAULT_OUTPUT_LIMIT_BYTES: usize = 16 << 20;

/// A command, as a caller names it; [`super::Table::start`] checks all of it.
#[derive(Debug, Clone)]
pub struct Command {
    pub program: Program,
    /// Default: the sandbox's working directory, then the user's home where that is missing too, then `/`.
    pub cwd: Option<String>,
    /// Added over the image's and the sandbox's environment.
    pub env: BTreeMap<String, String>,
    /// A name, a uid, or `uid:gid`. Default: the sandbox's user, else root.
    pub user: Option<String>,
}

#[derive(Debug, Clone)]
pub enum Program {
    /// Run as it stands; the program is looked up in PATH when it has no slash.
    Argv(Vec<String>),
    /// Run by `/bin/bash -c`, or `/bin/sh -c` where there is no bash.
    Shell(String),
}

/// How the process is attached to its caller.
#[derive(Debug, Clone)]
pub struct Options {
    pub stdin: Stdin,
    /// A terminal of this size is the process's stdin, stdout and stderr; `stdin` Bytes are then typed, Null is ignored.
    pub pty: Option<Size>,
    /// A name of the caller's choice, for [`super::Table::by_tag`].
    pub tag: Option<String>,
    /// Ends everything that the process started after this time. Default: none.
    pub timeout: Option<Duration>,
    /// What is kept of the output.
    pub keep: Keep,
}

impl Default for Options {
    fn default() -> Self {
        Self { stdin: Stdin::Null, pty: None, tag: None, timeout: None, keep: Keep::default() }
    }
}

#[derive(Debug, Clone)]
pub enum Stdin {
    /// `/dev/null`.
    Null,
    /// These bytes, then the end.
    Bytes(Bytes),
    /// A pipe that [`super::Process::write_stdin`] feeds.
    Open,
}

/// The size of a terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
pub struct Size {
    pub rows: u16,
    pub cols: u16,
}
