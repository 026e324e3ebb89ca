//! Processes of the host by pidfd and start time.
//!
//! Unsafe code because pidfds and signals are raw system calls here; every function is safe to call.
#![allow(unsafe_code)]

use std::{
    fs, io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::Arc,
};

use tokio::io::{unix::AsyncFd, Interest};

/// Descriptor of a living process. Fails with ESRCH when it is gone.
pub fn open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: plain numbers; the descriptor returned is ours.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned it, nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Sends a signal to exactly this process; a process that has ended already is no error.
pub fn signal(pidfd: &OwnedFd, signal: i32) -> io::Result<()> {
    // SAFETY: plain numbers, and no siginfo.
    let sent =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, std::ptr::null::<u8>(), 0) };
    match sent {
        0 => Ok(()),
        _ => match io::Error::last_os_error() {
            gone if gone.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            error => Err(error),
        },
    }
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It still runs.
    No,
    /// Exit status as a shell says it (128 + signal), when it was our child.
    Status(i32),
    /// It has ended, and was not our child (re-adopted after a restart).
    Unknown,
}

/// Asks without waiting; reaps a child of ours.
pub fn poll(pidfd: &OwnedFd) -> Ended {
    // SAFETY: siginfo of zeros is valid, and the call writes into it.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG;
    // SAFETY: `info` outlives the call.
    let got = unsafe { libc::waitid(libc::P_PIDFD, pidfd.as_raw_fd() as u32, &raw mut info, flags) };
    if got == 0 {
        // SAFETY: waitid succeeded, so the child fields of the union are those in use (zero when nothing ended).
        let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
        return match (pid, info.si_code) {
            (0, _) => Ended::No,
            (_, libc::CLD_EXITED) => Ended::Status(status),
            _ => Ended::Status(128 + status),
        };
    }
    let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd of ours.
    let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
    if ready > 0 {
        Ended::Unknown
    } else {
        Ended::No
    }
}

/// Waits until the process has ended, at most `timeout_ms`; says whether it has.
pub fn wait(pidfd: &OwnedFd, timeout_ms: i32) -> bool {
    let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd of ours.
    unsafe { libc::poll(&raw mut poll, 1, timeout_ms) > 0 }
}

/// Waits, without holding a thread, until the process has ended.
pub async fn ended(pidfd: Arc<OwnedFd>) -> io::Result<()> {
    // SAFETY: the descriptor is open for as long as what is registered exists, which holds the Arc.
    let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?;
    pidfd.readable().await.map(drop)
}

/// Start time in clock ticks since boot: with the pid, the identity of a process over restarts of noded.
pub fn start_time(pid: i32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let after = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let field = after.split_ascii_whitespace().nth(19).and_then(|field| field.parse().ok());
    field.ok_or_else(|| io::Error::other("no start time in /proc/PID/stat"))
}

/// Identity of this boot.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Seconds since boot, suspended time included: what leases are counted in, so that no clock jump ends or prolongs one.
pub fn boottime_s() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes into `time`.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Asks the kernel to send SIGTERM to this process when its parent dies.
pub fn die_with_parent() {
    // SAFETY: plain numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) };
}

/// A mount namespace of noded's own, so that nothing it mounts shows on the host or outlives it.
pub fn own_mount_namespace() -> io::Result<()> {
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: unshare takes flags; mount's strings are literals or null, as changing propagation allows.
    unsafe {
        if libc::unshare(libc::CLONE_NEWNS) != 0 {
            return Err(io::Error::last_os_error());
        }
        if libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none.cast()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Raises the limit of open files as far as it goes.
pub fn raise_file_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads into and from `limit`.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

pub fn is_root() -> bool {
    // SAFETY: takes nothing.
    unsafe { libc::geteuid() == 0 }
}
