//! Starting a process.
//!
//! `fork` would copy the page tables and `posix_spawn` can't put the child into a cgroup, so this is a vfork by hand: the
//! child borrows our memory on a stack of its own until its exec, and this thread sleeps meanwhile. All strings and
//! decisions are prepared before; the child makes system calls only, in the order of [`Step`].
#![allow(unsafe_code)] // a child on borrowed memory can't be had otherwise

use std::{
    arch::asm,
    ffi::{c_char, CStr, CString},
    io,
    os::fd::{AsRawFd as _, BorrowedFd, RawFd},
    ptr,
};

use super::filter::Secret;

/// The stack of a child until its exec. It calls two functions deep; most of it is never touched.
const STACK_SIZE_BYTES: usize = 32 << 10;

/// What the child becomes.
pub struct Child<'a> {
    pub path: &'a CStr,
    pub argv: &'a [CString],
    pub env: &'a [CString],
    /// Becomes 0, 1 and 2. All must be 3 or above.
    pub stdio: [BorrowedFd<'a>; 3],
    /// The first of `stdio` becomes the controlling terminal.
    pub terminal: bool,
    pub cwd: BorrowedFd<'a>,
    /// None: as this process.
    pub identity: Option<Identity<'a>>,
    /// A directory of the cgroup v2 tree that the child is born into.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// More descriptors of this process, and their numbers in the child, which none of them may have here.
    pub inherit: &'a [(RawFd, RawFd)],
}

#[derive(Clone, Copy)]
pub struct Identity<'a> {
    pub uid: u32,
    pub gid: u32,
    pub groups: &'a [u32],
}

/// What the child does before it is the new program, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Clone,
    Session,
    Stdio,
    Terminal,
    Cwd,
    Groups,
    Gid,
    Uid,
    Exec,
}

/// The step that failed, and why.
#[derive(Debug)]
pub struct Failure {
    pub step: Step,
    pub error: io::Error,
}

/// Starts processes, one after the other.
pub struct Spawner {
    stack: Box<[u128]>,
    secret: Secret,
}

/// `struct clone_args` of the kernel, version 2.
#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// All that the child reads and writes; it lives on the parent's stack while the parent sleeps.
struct Job {
    path: *const c_char,
    argv: *const *const c_char,
    env: *const *const c_char,
    stdio: [RawFd; 3],
    terminal: bool,
    cwd: RawFd,
    identity: bool,
    uid: u32,
    gid: u32,
    groups: *const u32,
    group_count: usize,
    inherit: *const (RawFd, RawFd),
    inherit_count: usize,
    failed: Option<(Step, i32)>,
}

impl Spawner {
    /// `secret`: of the filter that this process is under.
    pub fn new(secret: Secret) -> Self {
        Self { secret, stack: vec![0; STACK_SIZE_BYTES / size_of::<u128>()].into_boxed_slice() }
    }

    /// Starts `child` and gives its pid once its program runs.
    ///
    /// Errors: [`Failure`]; nothing of the child is left then.
    pub fn spawn(&mut self, child: &Child<'_>) -> Result<u32, Failure> {
        let argv = pointers(child.argv);
        let env = pointers(child.env);
        let mut job = Job {
            path: child.path.as_ptr(),
            argv: argv.as_ptr(),
            env: env.as_ptr(),
            stdio: child.stdio.map(|fd| fd.as_raw_fd()),
            terminal: child.terminal,
            cwd: child.cwd.as_raw_fd(),
            identity: child.identity.is_some(),
            uid: child.identity.map_or(0, |identity| identity.uid),
            gid: child.identity.map_or(0, |identity| identity.gid),
            groups: child.identity.map_or(ptr::null(), |identity| identity.groups.as_ptr()),
            group_count: child.identity.map_or(0, |identity| identity.groups.len()),
            inherit: child.inherit.as_ptr(),
            inherit_count: child.inherit.len(),
            failed: None,
        };
        let flags = (libc::CLONE_VM | libc::CLONE_VFORK) as u64;
        let stack = self.stack.as_mut_ptr();
        // SAFETY: the stack is ours alone (`&mut self`), 16-aligned by its element type, and outlives the child's use of it,
        // since CLONE_VFORK keeps this thread asleep until the child's exec or exit. `job` and all it points to live until
        // then too. `enter` never returns, so the child never runs our frames. No signal handler is installed in this
        // process, so none can run in the child on our memory.
        let result = unsafe {
            match child.cgroup {
                Some(cgroup) => {
                    let args = CloneArgs {
                        flags: flags | CLONE_INTO_CGROUP,
                        exit_signal: libc::SIGCHLD as u64,
                        stack: stack as u64,
                        stack_size: STACK_SIZE_BYTES as u64,
                        cgroup: cgroup.as_raw_fd() as u64,
                        ..CloneArgs::default()
                    };
                    let args = [&raw const args as usize, size_of::<CloneArgs>()];
                    clone_call(libc::SYS_clone3, args, self.secret.0, &raw mut job)
                }
                // Without a group plain clone will do, which container runtimes that forbid clone3 allow.
                None => {
                    let top = stack.add(self.stack.len());
                    let args = [flags as usize | libc::SIGCHLD as usize, top as usize];
                    clone_call(libc::SYS_clone, args, [0; 2], &raw mut job)
                }
            }
        };
        if result < 0 {
            return Err(Failure { step: Step::Clone, error: io::Error::from_raw_os_error(-result as i32) });
        }
        let pid = result as u32;
        // SAFETY: a valid reference; the read is volatile because the child wrote behind the compiler's back.
        if let Some((step, errno)) = unsafe { ptr::read_volatile(&raw const job.failed) } {
            super::wait::reap_one(Some(pid));
            return Err(Failure { step, error: io::Error::from_raw_os_error(errno) });
        }
        Ok(pid)
    }
}

/// From linux/sched.h; libc's constant doesn't fit its own type.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
}

/// Calls clone or clone3 with two arguments, and two more words for clone's unused ones or the filter's secret; the child runs `enter(job)` on its new stack.
///
/// # Safety
/// The arguments must describe a child that shares memory with a stack of its own, and `job` must outlive its use.
#[cfg(target_arch = "x86_64")]
unsafe fn clone_call(call: libc::c_long, args: [usize; 2], more: [u64; 2], job: *mut Job) -> isize {
    let result: isize;
    // SAFETY: the registers that hold `job` and the entry survive the system call in both processes. The parent jumps over
    // the child's part; the child ends in `enter`. The call pushes onto a 16-aligned stack, as the ABI wants.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") call as isize => result,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") more[0],
            in("r10") more[1],
            in("r8") 0,
            in("r12") enter as extern "C" fn(*mut Job) -> !,
            in("r13") job,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

#[cfg(target_arch = "aarch64")]
unsafe fn clone_call(call: libc::c_long, args: [usize; 2], more: [u64; 2], job: *mut Job) -> isize {
    let result: isize;
    // SAFETY: as above, with this machine's registers.
    unsafe {
        asm!(
            "svc #0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x0, x21",
            "blr x20",
            "brk #1",
            "2:",
            in("x8") call,
            inlateout("x0") args[0] as isize => result,
            in("x1") args[1],
            in("x2") more[0],
            in("x3") more[1],
            in("x4") 0,
            in("x20") enter as extern "C" fn(*mut Job) -> !,
            in("x21") job,
        );
    }
    result
}

/// The child's whole life before its program.
extern "C" fn enter(job: *mut Job) -> ! {
    // SAFETY: the parent keeps `job` and all it points to alive and untouched while we run. System calls only: no
    // allocation, no lock, no panic. glibc's wrappers of the set*id calls would tell other threads; the raw calls change
    // this process only.
    unsafe {
        let job = &mut *job;
        let (step, errno) = become_program(job);
        ptr::write_volatile(&raw mut job.failed, Some((step, errno)));
        loop {
            libc::syscall(libc::SYS_exit_group, 127);
        }
    }
}

/// Returns only on failure.
///
/// # Safety
/// Only in the child of [`Spawner::spawn`].
unsafe fn become_program(job: &Job) -> (Step, i32) {
    macro_rules! attempt {
        ($step:expr, $number:expr $(, $argument:expr)*) => {
            if libc::syscall($number $(, $argument)*) < 0 {
                return ($step, *libc::__errno_location());
            }
        };
    }
    // SAFETY: the pointers in `job` are valid by the caller's promise; the kernel only reads through them.
    unsafe {
        attempt!(Step::Session, libc::SYS_setsid);
        for (number, fd) in job.stdio.iter().enumerate() {
            attempt!(Step::Stdio, libc::SYS_dup3, *fd, number, 0);
        }
        if job.terminal {
            attempt!(Step::Terminal, libc::SYS_ioctl, 0, libc::TIOCSCTTY, 0);
        }
        // Before the user changes: a caller may start a user in a directory that only root can enter.
        attempt!(Step::Cwd, libc::SYS_fchdir, job.cwd);
        // After the directory's descriptor was used: one of these numbers can be its own.
        for index in 0..job.inherit_count {
            let (fd, number) = *job.inherit.add(index);
            attempt!(Step::Stdio, libc::SYS_dup3, fd, number, 0);
        }
        if job.identity {
            attempt!(Step::Groups, libc::SYS_setgroups, job.group_count, job.groups);
            attempt!(Step::Gid, libc::SYS_setresgid, job.gid, job.gid, job.gid);
            // Leaving 0 for another id clears the permitted, effective and ambient capabilities.
            attempt!(Step::Uid, libc::SYS_setresuid, job.uid, job.uid, job.uid);
        }
        let none = 0_u64;
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const none, 0, size_of::<u64>());
        attempt!(Step::Exec, libc::SYS_execve, job.path, job.argv, job.env);
    }
    (Step::Exec, libc::EINVAL)
}
