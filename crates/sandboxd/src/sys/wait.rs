//! Reaping, with what the dead consumed.
#![allow(unsafe_code)] // wait4 and getrusage have no safe wrapper that gives struct rusage

use std::mem::MaybeUninit;

/// What processes consumed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Consumed {
    pub cpu_s: f64,
    pub memory_peak_bytes: u64,
    pub io_read_bytes: u64,
    pub io_write_bytes: u64,
}

/// A process that ended: by an exit code, or by a signal.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    pub pid: u32,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub consumed: Consumed,
}

/// Reaps one child that has ended; None when there is none now. With `pid`, waits for that child.
pub fn reap_one(pid: Option<u32>) -> Option<Ended> {
    let mut status = 0;
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    let (target, flags) = pid.map_or((-1, libc::WNOHANG), |pid| (pid as libc::pid_t, 0));
    // SAFETY: `status` and `usage` are room of the right types that outlives the call; any pid is valid to ask for.
    let reaped = unsafe { libc::wait4(target, &raw mut status, flags, usage.as_mut_ptr()) };
    if reaped <= 0 {
        return None;
    }
    // SAFETY: all bits zero are a valid rusage, and the kernel has filled it in.
    let usage = unsafe { usage.assume_init() };
    Some(Ended {
        pid: reaped as u32,
        exit_code: libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)),
        signal: libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status)),
        consumed: convert(&usage),
    })
}

/// What this process and all its reaped descendants have consumed.
pub fn consumed() -> Consumed {
    let mut total = Consumed::default();
    for who in [libc::RUSAGE_SELF, libc::RUSAGE_CHILDREN] {
        let mut usage = MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: `usage` is room of the right type; both values of `who` are valid, so the call can't fail, and all bits
        // zero would be a valid rusage even then.
        let usage = unsafe {
            libc::getrusage(who, usage.as_mut_ptr());
            usage.assume_init()
        };
        let part = convert(&usage);
        total.cpu_s += part.cpu_s;
        total.memory_peak_bytes = total.memory_peak_bytes.max(part.memory_peak_bytes);
        total.io_read_bytes += part.io_read_bytes;
        total.io_write_bytes += part.io_write_bytes;
    }
    total
}

fn convert(usage: &libc::rusage) -> Consumed {
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    Consumed {
        cpu_s: seconds(usage.ru_utime) + seconds(usage.ru_stime),
        memory_peak_bytes: usage.ru_maxrss as u64 * 1024,
        // The kernel counts blocks of 512 bytes here, whatever the file system's own are.
        io_read_bytes: usage.ru_inblock as u64 * 512,
        io_write_bytes: usage.ru_oublock as u64 * 512,
    }
}
