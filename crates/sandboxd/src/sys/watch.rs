//! Descriptors that the event loop watches.
#![allow(unsafe_code)] // tokio makes the caller promise that the descriptor stays open

use std::{fs::File, io, os::fd::OwnedFd};

use tokio::io::{unix::AsyncFd, Interest};

use super::Signals;

/// Makes `fd` non-blocking and has it watched.
pub fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<File>> {
    rustix::io::ioctl_fionbio(&fd, true)?;
    // SAFETY: a File owns its descriptor, never changes it, and closes it on drop only.
    Ok(unsafe { AsyncFd::register_with_interest(File::from(fd), interest) }?)
}

pub fn watch_signals(signals: Signals) -> io::Result<AsyncFd<Signals>> {
    // SAFETY: Signals owns its descriptor and has nothing that changes it.
    Ok(unsafe { AsyncFd::register_with_interest(signals, Interest::READABLE) }?)
}
