//! sandboxd: the daemon in every sandbox.
//!
//! It is PID 1 of the sandbox (or, in tests and pods, an ordinary process that is a subreaper) and needs nothing of the
//! image. One thread does everything about processes; a few short-lived threads do blocking file work.
//!
//! # Layout
//! - [`start`]: what happens before the first connection: arguments, descriptors, signals, privileges.
//! - [`server`]: listeners, connections (also those handed over by noded), the router, bodies and their encodings.
//! - [`proc`]: the table of processes: start, output, stdin, signals, wait, kill, reaping.
//! - [`session`]: shells that last between commands.
//! - [`files`]: Sandmill's file calls. [`e2b`]: E2B's envd services on top of `proc` and `files`.
//! - [`usage`], [`activity`], [`tunnel`]: what the sandbox consumes, whether it is in use, ports inside it.
//! - [`tether`]: its end when nobody looks after it any more.
//! - [`sys`]: the system calls that no safe crate wraps; all `unsafe` of the crate is there.
//!
//! The contract with the outside is `docs/reference/protocols.md`, sections 3 and 5.

mod activity;
mod app;
mod e2b;
mod files;
mod proc;
mod server;
mod session;
mod start;
mod sys;
mod tether;
mod tunnel;
mod usage;

use std::process::ExitCode;

fn main() -> ExitCode {
    match start::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("sandboxd: {message}");
            ExitCode::from(2)
        }
    }
}
