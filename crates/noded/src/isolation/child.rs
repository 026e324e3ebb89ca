//! What the new process does between clone and the exec of sandboxd: a straight line of system calls.
//!
//! Unsafe code because the child shares its parent's memory (CLONE_VM, so that no page table is copied) while the parent's
//! threads run on: nothing here allocates, locks, panics or writes what the parent may read, but for the slot made for
//! that. Every string and number was prepared before the clone. libc's wrappers are out of the question, since they write
//! errno into thread-local storage that the child shares with a running thread.
#![allow(unsafe_code)]

use std::{
    ffi::CString,
    os::fd::RawFd,
    sync::atomic::{AtomicU32, Ordering},
};

macro_rules! steps {
    ($($name:ident = $text:literal,)*) => {
        /// Steps of the child, for the error that names the one that failed.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Step { $($name),* }

        /// What each step is called in an error.
        const TEXTS: &[&str] = &[$($text),*];
    };
}

steps! {
    WaitForParent = "receive the mounts",
    CgroupNamespace = "unshare the cgroup namespace",
    EnterCgroup = "enter the cgroup",
    BecomeRoot = "become root of the user namespace",
    PrivateMounts = "make mounts private",
    AttachRoot = "attach the root overlay",
    EnterRoot = "enter the root",
    AttachTree = "attach a tree below the root",
    MountProc = "mount /proc",
    NoUserNamespaces = "forbid further user namespaces",
    MountDevpts = "mount /dev/pts",
    MountShm = "mount /dev/shm",
    Mask = "mask a path of /proc",
    ReadOnly = "make a path of /proc read-only",
    Pivot = "pivot_root",
    LeaveHost = "unmount the host's root",
    Hostname = "set the host name",
    Keyring = "join a session keyring of its own",
    Limits = "set resource limits",
    Loopback = "bring up loopback",
    Affinity = "set the CPU affinity",
    Descriptors = "arrange descriptors",
    Capabilities = "drop capabilities",
    NoNewPrivileges = "set no_new_privs",
    Seccomp = "install the seccomp filter",
    Exec = "execute sandboxd",
}

/// Where a child leaves its step and errno.
#[derive(Debug, Default)]
pub struct Slot {
    step: AtomicU32,
    errno: AtomicU32,
}

impl Slot {
    /// The failed step and its errno; None if the child never reported one.
    pub fn failure(&self) -> Option<(&'static str, i32)> {
        let step = self.step.load(Ordering::Acquire) as usize;
        let errno = self.errno.load(Ordering::Relaxed) as i32;
        (step != 0).then(|| (TEXTS.get(step - 1).copied().unwrap_or("unknown step"), errno))
    }
}

/// A bit for each of 1024 CPUs.
pub type CpuMask = [u64; 16];

/// All that the child needs, prepared by the parent; nothing of it changes while the child runs.
pub struct Plan {
    /// Where the parent sends the detached mounts: first the root, then one for each of `attaches`.
    pub channel: RawFd,
    /// The child's copy of the parent's end: closed first, or the child would never learn that a killed parent is gone, and
    /// keep its copy of noded's lock meanwhile.
    pub parents_end: RawFd,
    /// A directory that anyone may enter; the root is attached over it.
    pub staging: CString,
    /// Where the mounts after the first go, relative to the root, in this order.
    pub attaches: Vec<CString>,
    pub shm_options: CString,
    pub masked_files: Vec<CString>,
    pub masked_dirs: Vec<CString>,
    pub read_only: Vec<CString>,
    pub hostname: CString,
    pub affinity: Option<CpuMask>,
    /// The `tasks` files of the sandbox's cgroup v1 directories; -1 after the last.
    pub tasks: [RawFd; MAX_TASKS],
    /// Descriptors that become 0..=7: null, null, log, listener, cgroup or null, configuration, readiness, tether.
    pub inherited: [RawFd; INHERITED],
    pub program: RawFd,
    /// Highest capability of this kernel.
    pub last_capability: u32,
    /// Capabilities that stay, as a bit mask.
    pub capabilities: u64,
    pub filter: Vec<libc::sock_filter>,
    pub slot: Slot,
}

/// Raw system call: libc's wrappers write errno into thread-local storage that the child shares with a running thread.
#[cfg(target_arch = "x86_64")]
unsafe fn call(number: libc::c_long, a: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the caller answers for the arguments; the clobbers are those of the kernel's ABI.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") number as isize => result, in("rdi") a[0], in("rsi") a[1], in("rdx") a[2],
            in("r10") a[3], in("r8") a[4], in("r9") a[5], lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

#[cfg(target_arch = "aarch64")]
unsafe fn call(number: libc::c_long, a: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("svc 0", in("x8") number, inlateout("x0") a[0] as isize => result, in("x1") a[1], in("x2") a[2],
            in("x3") a[3], in("x4") a[4], in("x5") a[5], options(nostack));
    }
    result
}

macro_rules! sys {
    ($plan:expr, $step:expr, $number:expr $(, $argument:expr)* $(,)?) => {{
        let mut all = [0usize; 6];
        let given = [$($argument as usize),*];
        let mut n = 0;
        while n < given.len() {
            all[n] = given[n];
            n += 1;
        }
        // SAFETY: every pointer among the arguments was prepared by the parent or lives on this stack.
        let result = unsafe { call($number, all) };
        if result < 0 {
            fail($plan, $step, -result);
        }
        result
    }};
}

fn fail(plan: &Plan, step: Step, errno: isize) -> ! {
    let slot = &plan.slot;
    slot.errno.store(errno as u32, Ordering::Relaxed);
    slot.step.store(step as u32 + 1, Ordering::Release);
    loop {
        // SAFETY: exit takes a number and does not come back.
        unsafe { call(libc::SYS_exit_group, [1, 0, 0, 0, 0, 0]) };
    }
}

/// Descriptors that sandboxd is given.
pub const INHERITED: usize = 8;
/// Most mounts that one message carries.
pub const MAX_MOUNTS: usize = 8;
/// Most cgroup v1 hierarchies that a sandbox has groups in.
pub const MAX_TASKS: usize = 4;

/// The child's whole life.
pub extern "C" fn run(plan: *const Plan) -> ! {
    // SAFETY: the parent passes a Plan that outlives the child's use of it.
    let plan = unsafe { &*plan };
    sys!(plan, Step::WaitForParent, libc::SYS_close, plan.parents_end);
    cgroups(plan);
    let mounts = receive(plan); // by now the parent has written the id maps
    sys!(plan, Step::BecomeRoot, libc::SYS_setresgid, 0, 0, 0);
    sys!(plan, Step::BecomeRoot, libc::SYS_setgroups, 0, NULL);
    sys!(plan, Step::BecomeRoot, libc::SYS_setresuid, 0, 0, 0);
    sys!(plan, Step::BecomeRoot, libc::SYS_setsid);
    sys!(plan, Step::BecomeRoot, libc::SYS_umask, 0o22);
    root(plan, &mounts);
    proc(plan);
    sys!(plan, Step::Pivot, libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr());
    sys!(plan, Step::LeaveHost, libc::SYS_umount2, c".".as_ptr(), libc::MNT_DETACH);
    sys!(plan, Step::LeaveHost, libc::SYS_chdir, c"/".as_ptr());
    let name = plan.hostname.as_bytes();
    sys!(plan, Step::Hostname, libc::SYS_sethostname, name.as_ptr(), name.len());
    loopback(plan);
    if let Some(set) = &plan.affinity {
        sys!(plan, Step::Affinity, libc::SYS_sched_setaffinity, 0, size_of_val(set), &raw const *set);
    }
    descriptors(plan);
    ordinary(plan);
    privileges(plan);
    let argv = [c"sandboxd".as_ptr(), c"--fds".as_ptr(), std::ptr::null()];
    let envp = [std::ptr::null::<libc::c_char>()];
    let flags = libc::AT_EMPTY_PATH;
    sys!(plan, Step::Exec, libc::SYS_execveat, PROGRAM, c"".as_ptr(), argv.as_ptr(), envp.as_ptr(), flags);
    fail(plan, Step::Exec, 0)
}

const NULL: usize = 0;
/// Where the program's descriptor lies at the exec.
const PROGRAM: RawFd = INHERITED as RawFd;

/// Enters the groups of cgroup v1 (we were born into that of v2), which then are the roots of our view.
///
/// A thread that moves itself by `tasks` is the one kind of move that locks out nobody's fork: anything else waits for every
/// CPU to pass a quiet state, and all other changes of cgroups wait behind it.
fn cgroups(plan: &Plan) {
    for tasks in plan.tasks {
        if tasks >= 0 {
            sys!(plan, Step::EnterCgroup, libc::SYS_write, tasks, c"0".as_ptr(), 1);
        }
    }
    sys!(plan, Step::CgroupNamespace, libc::SYS_unshare, libc::CLONE_NEWCGROUP);
}

fn root(plan: &Plan, mounts: &[RawFd; MAX_MOUNTS]) {
    let private = libc::MS_REC | libc::MS_PRIVATE;
    sys!(plan, Step::PrivateMounts, libc::SYS_mount, NULL, c"/".as_ptr(), NULL, private, NULL);
    attach(plan, Step::AttachRoot, mounts[0], plan.staging.as_ptr());
    sys!(plan, Step::EnterRoot, libc::SYS_chdir, plan.staging.as_ptr());
    for (target, mount) in plan.attaches.iter().zip(&mounts[1..]) {
        attach(plan, Step::AttachTree, *mount, target.as_ptr());
    }
    let (devpts, flags) = (c"devpts".as_ptr(), libc::MS_NOSUID | libc::MS_NOEXEC);
    let options = c"newinstance,ptmxmode=0666,mode=0620,gid=5".as_ptr();
    sys!(plan, Step::MountDevpts, libc::SYS_mount, devpts, c"dev/pts".as_ptr(), devpts, flags, options);
    let options = plan.shm_options.as_ptr();
    let tmpfs = c"tmpfs".as_ptr();
    let flags = libc::MS_NOSUID | libc::MS_NODEV;
    sys!(plan, Step::MountShm, libc::SYS_mount, c"shm".as_ptr(), c"dev/shm".as_ptr(), tmpfs, flags, options);
}

const SAFE: libc::c_ulong = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;

fn proc(plan: &Plan) {
    let proc = c"proc".as_ptr();
    sys!(plan, Step::MountProc, libc::SYS_mount, proc, proc, proc, SAFE, NULL);
    let path = c"proc/sys/user/max_user_namespaces".as_ptr();
    let file =
        sys!(plan, Step::NoUserNamespaces, libc::SYS_openat, libc::AT_FDCWD, path, libc::O_WRONLY | libc::O_CLOEXEC, 0);
    sys!(plan, Step::NoUserNamespaces, libc::SYS_write, file, c"0".as_ptr(), 1);
    sys!(plan, Step::NoUserNamespaces, libc::SYS_close, file);
    for path in &plan.masked_files {
        sys!(plan, Step::Mask, libc::SYS_mount, c"dev/null".as_ptr(), path.as_ptr(), NULL, libc::MS_BIND, NULL);
    }
    for path in &plan.masked_dirs {
        // An empty directory of the read-only /dev.
        sys!(plan, Step::Mask, libc::SYS_mount, c"dev/mqueue".as_ptr(), path.as_ptr(), NULL, libc::MS_BIND, NULL);
    }
    for path in &plan.read_only {
        sys!(plan, Step::ReadOnly, libc::SYS_mount, path.as_ptr(), path.as_ptr(), NULL, libc::MS_BIND, NULL);
        let flags = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY | SAFE;
        sys!(plan, Step::ReadOnly, libc::SYS_mount, NULL, path.as_ptr(), NULL, flags, NULL);
    }
}

/// Undoes what noded's own process has that is out of the ordinary.
fn ordinary(plan: &Plan) {
    // keyctl(KEYCTL_JOIN_SESSION_KEYRING, NULL): else the host's session keys could be used.
    // SAFETY: plain numbers. A kernel without keyrings, or a full quota of them, has nothing to leave behind.
    let joined = unsafe { call(libc::SYS_keyctl, [1, 0, 0, 0, 0, 0]) };
    if joined < 0 && joined != -(libc::ENOSYS as isize) {
        fail(plan, Step::Keyring, -joined);
    }
    // Rust's start-up ignores SIGPIPE, and what is ignored stays so over an exec. SIG_DFL is all zeros.
    let default = [0_usize; 4];
    let size = size_of::<u64>();
    sys!(plan, Step::Descriptors, libc::SYS_rt_sigaction, libc::SIGPIPE, default.as_ptr(), NULL, size);
    for (resource, soft) in [(libc::RLIMIT_NOFILE, SOFT_FILES), (libc::RLIMIT_CORE, 0)] {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        sys!(plan, Step::Limits, libc::SYS_prlimit64, 0, resource, NULL, &raw mut limit);
        limit.rlim_cur = if soft < limit.rlim_max { soft } else { limit.rlim_max };
        sys!(plan, Step::Limits, libc::SYS_prlimit64, 0, resource, &raw const limit, NULL);
    }
}

/// Open files of a process unless it raises its limit: what servers expect, and not so many that a program which closes
/// all of them one by one takes long.
const SOFT_FILES: libc::rlim_t = 16384;

/// Gives up what no sandbox needs; the filter comes last, since it forbids most of what stands above.
fn privileges(plan: &Plan) {
    let empty = 0_u64;
    let how = libc::SIG_SETMASK;
    sys!(plan, Step::Descriptors, libc::SYS_rt_sigprocmask, how, &raw const empty, NULL, size_of::<u64>());
    let mut capability = 0;
    while capability <= plan.last_capability {
        if plan.capabilities & (1 << capability) == 0 {
            sys!(plan, Step::Capabilities, libc::SYS_prctl, libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
        }
        capability += 1;
    }
    sys!(plan, Step::NoNewPrivileges, libc::SYS_prctl, libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    let program = libc::sock_fprog { len: plan.filter.len() as u16, filter: plan.filter.as_ptr().cast_mut() };
    sys!(plan, Step::Seccomp, libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program);
}

fn attach(plan: &Plan, step: Step, mount: RawFd, target: *const libc::c_char) {
    sys!(plan, step, libc::SYS_move_mount, mount, c"".as_ptr(), libc::AT_FDCWD, target, 4);
}

/// Waits for the parent's message with the detached mounts.
fn receive(plan: &Plan) -> [RawFd; MAX_MOUNTS] {
    let mut fds = [-1; MAX_MOUNTS];
    let mut byte = 0u8;
    let mut vector = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut control = [0u64; 2 + MAX_MOUNTS / 2];
    // SAFETY: msghdr of zeros is valid; the fields that matter are set next.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut vector;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    let got =
        sys!(plan, Step::WaitForParent, libc::SYS_recvmsg, plan.channel, &raw mut message, libc::MSG_CMSG_CLOEXEC);
    if got != 1 {
        fail(plan, Step::WaitForParent, libc::EPIPE as isize);
    }
    // SAFETY: the kernel wrote a control message with descriptors into `control`; it lies there in whole.
    unsafe {
        let header = control.as_ptr().cast::<libc::cmsghdr>();
        let count = ((*header).cmsg_len - size_of::<libc::cmsghdr>()) / size_of::<RawFd>();
        let data = header.add(1).cast::<RawFd>();
        let mut n = 0;
        while n < count && n < MAX_MOUNTS {
            fds[n] = data.add(n).read();
            n += 1;
        }
    }
    fds
}

fn loopback(plan: &Plan) {
    let socket = sys!(plan, Step::Loopback, libc::SYS_socket, libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
    // SAFETY: ifreq of zeros is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    sys!(plan, Step::Loopback, libc::SYS_ioctl, socket, libc::SIOCSIFFLAGS, &raw mut request);
    sys!(plan, Step::Loopback, libc::SYS_close, socket);
}

/// Lays the descriptors where sandboxd expects them (0..=7) and closes all else at the exec.
fn descriptors(plan: &Plan) {
    // First out of the way of the targets, then onto them.
    let mut high = [0; INHERITED + 1];
    let mut n = 0;
    while n <= INHERITED {
        let from = if n < INHERITED { plan.inherited[n] } else { plan.program };
        high[n] = sys!(plan, Step::Descriptors, libc::SYS_fcntl, from, libc::F_DUPFD_CLOEXEC, 16);
        n += 1;
    }
    n = 0;
    while n < INHERITED {
        sys!(plan, Step::Descriptors, libc::SYS_dup3, high[n], n, 0);
        n += 1;
    }
    sys!(plan, Step::Descriptors, libc::SYS_dup3, high[INHERITED], PROGRAM, libc::O_CLOEXEC);
    let flags = libc::CLOSE_RANGE_CLOEXEC;
    sys!(plan, Step::Descriptors, libc::SYS_close_range, PROGRAM, u32::MAX, flags);
}
