//! Processes: the table of everything that calls started.
//!
//! The API inside the daemon (all on its one thread; nothing here is `Send`):
//!
//! - [`Table::start`] starts a [`Command`] with [`Options`] and gives back its [`Process`]. It never awaits, so the reaper
//!   cannot see a child before the table knows it.
//! - [`Table::get`], [`Table::by_tag`], [`Table::list`]: processes that run, and the latest that ended.
//! - [`Process::subscribe`]: output from byte offsets, kept first, then live, then the end. Several at once are fine; one
//!   that is slower than the process gets [`Event::Gap`], and never holds up the process or others.
//!   [`Process::subscribe_paced`] is for who must get all of it: there the process waits, as it does at a full pipe.
//! - [`Process::write_stdin`], [`Process::close_stdin`], [`Process::signal`], [`Process::resize`].
//! - [`Process::wait`]: the [`Outcome`], as often as asked. [`Process::kill`]: ends all that the process started.
//!
//! A process's pipes are always drained, whether somebody reads its output or not: a process never blocks because its
//! client is gone, or slow (unless that one asked for pacing). What doesn't fit the kept part is dropped, oldest first, and
//! is reported as a gap.

mod accounts;
pub mod calls;
mod command;
mod fallback;
mod frames;
mod group;
mod oom;
mod outcome;
mod output;
mod prepare;
mod process;
mod pump;
mod stat;
mod subscription;
mod table;

pub use accounts::{Account, AccountNames};
pub use command::{Command, Options, Program, Size, Stdin, DEFAULT_OUTPUT_LIMIT_BYTES};
pub use outcome::{CallUsage, Outcome, Reason};
pub use output::{Cut, Keep, Stream};
pub use prepare::{invalid, shell};
pub use process::Process;
pub use stat::{now_ticks, pids, ticks_per_second, Stat};
pub use subscription::{Event, Offsets, Subscription};
pub use table::{give, Means, Table};
