//! The parent's half of a create: clone, id maps, overlays, and waiting until sandboxd is ready; see `child` for what runs on
//! the other side.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::net::{AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType};

use super::{
    child::{CpuMask, Plan, Slot, MAX_MOUNTS, MAX_TASKS},
    clone::clone,
    mount::{self, FsContext, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY},
    template::Templates,
    StepError,
};

/// Ids of a sandbox's range.
pub const RANGE: u32 = 65536;
/// How long sandboxd may take until it accepts connections.
const READY: Duration = Duration::from_secs(20);

/// What is the same for every sandbox of this node, prepared once.
pub struct Ground {
    pub templates: Templates,
    program: OwnedFd,
    null: File,
    log: File,
    filter: Vec<libc::sock_filter>,
    last_capability: u32,
    staging: CString,
    masked_files: Vec<CString>,
    masked_dirs: Vec<CString>,
    read_only: Vec<CString>,
}

/// One overlay to mount.
pub struct Overlay {
    /// Relative to the root; empty for the root itself.
    pub target: String,
    /// Topmost first.
    pub lower: Vec<PathBuf>,
    pub upper: PathBuf,
    pub work: PathBuf,
}

/// One sandbox to start.
pub struct Start<'a> {
    pub overlays: &'a [Overlay],
    pub uid_base: u32,
    pub hostname: &'a str,
    pub shm_bytes: u64,
    /// Shown at /sys/fs/cgroup instead of the template's "no limit"; its `memory` directory may be covered by
    /// `memory_group`.
    pub limits_dir: Option<&'a Path>,
    pub memory_group: Option<&'a Path>,
    pub affinity: Option<Vec<usize>>,
    pub listener: BorrowedFd<'a>,
    /// Its directory in the cgroup v2 tree.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// The `tasks` files of its cgroup v1 directories, open for writing.
    pub tasks: &'a [OwnedFd],
    pub config: BorrowedFd<'a>,
    /// The reading end of a pipe that ends when we do.
    pub tether: BorrowedFd<'a>,
    /// Capabilities that sandboxd keeps.
    pub capabilities: u64,
}

/// A sandbox whose sandboxd is ready.
#[derive(Debug)]
pub struct Started {
    pub pid: i32,
    pub pidfd: OwnedFd,
}

/// Docker's masked and read-only paths under /proc (those of /sys are absent: our /sys is synthetic).
const MASKED: [&str; 10] = [
    "proc/asound",
    "proc/acpi",
    "proc/interrupts",
    "proc/kcore",
    "proc/keys",
    "proc/latency_stats",
    "proc/timer_list",
    "proc/timer_stats",
    "proc/sched_debug",
    "proc/scsi",
];
const READ_ONLY: [&str; 5] = ["proc/bus", "proc/fs", "proc/irq", "proc/sys", "proc/sysrq-trigger"];

impl Ground {
    /// Prepares templates under `dir` and opens the sandboxd program.
    pub fn prepare(dir: &Path, sandboxd: &Path, log: &Path) -> io::Result<Self> {
        let exists = |path: &&&str| Path::new("/").join(path).exists();
        let is_dir = |path: &&str| Path::new("/").join(path).is_dir();
        let c = |path: &&str| CString::new(*path).expect("a literal holds no NUL");
        let present: Vec<&str> = MASKED.iter().filter(exists).copied().collect();
        let (dirs, files): (Vec<&str>, Vec<&str>) = present.into_iter().partition(is_dir);
        // Opened through a read-only mount: nobody who gets hold of this description can write the program.
        let folder = sandboxd.parent().unwrap_or(Path::new("/"));
        let tree = mount::clone_tree(folder)?;
        mount::set_attributes(tree.as_fd(), MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV, None)?;
        let name = sandboxd.file_name().ok_or_else(|| io::Error::other("sandboxd's path names no file"))?;
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
        let program = rustix::fs::openat(&tree, name, flags, rustix::fs::Mode::empty())?;
        let last = fs::read_to_string("/proc/sys/kernel/cap_last_cap").ok().and_then(|text| text.trim().parse().ok());
        Ok(Self {
            templates: Templates::make(dir)?,
            program,
            null: File::options().read(true).write(true).open("/dev/null")?,
            log: File::options().append(true).create(true).open(log)?,
            filter: super::seccomp::compile(),
            last_capability: last.unwrap_or(40),
            staging: CString::new("/tmp").expect("a literal holds no NUL"),
            masked_files: files.iter().map(c).collect(),
            masked_dirs: dirs.iter().map(c).collect(),
            read_only: READ_ONLY.iter().filter(exists).map(c).collect(),
        })
    }

    /// Makes one sandbox and waits until its sandboxd accepts connections. `connect` gives the new process's namespace its
    /// network.
    ///
    /// On an error nothing of it runs any more. Blocks; call it from a blocking thread.
    pub fn start(&self, start: &Start<'_>, connect: impl FnOnce(i32) -> io::Result<()>) -> Result<Started, StepError> {
        let at = StepError::at;
        let (ours, theirs) = channel().map_err(at("make the channel"))?;
        let (ready_read, ready_write) = pipe().map_err(at("make the readiness pipe"))?;
        let plan = self.plan(start, (&ours, &theirs), &ready_write)?;
        let cloned = clone(&plan, start.cgroup).map_err(at("clone"))?;
        drop((theirs, ready_write));
        let outcome = self.equip(start, &cloned, &ours, connect).and_then(|()| wait_ready(&ready_read, &plan.slot));
        // On failure the child has to be gone before its plan is freed; after readiness it runs in memory of its own.
        if let Err(error) = outcome {
            let _ = super::process::signal(&cloned.pidfd, libc::SIGKILL);
            super::process::wait(&cloned.pidfd, 10_000);
            super::process::poll(&cloned.pidfd);
            return Err(match plan.slot.failure() {
                Some((step, errno)) => StepError { step, source: io::Error::from_raw_os_error(errno) },
                None => error,
            });
        }
        Ok(cloned)
    }

    fn plan(&self, start: &Start<'_>, channel: (&OwnedFd, &OwnedFd), ready: &OwnedFd) -> Result<Box<Plan>, StepError> {
        let text = |text: String| {
            CString::new(text).map_err(|_| StepError::at("prepare strings")(io::Error::from_raw_os_error(libc::EINVAL)))
        };
        let mut attaches = Vec::new();
        for overlay in start.overlays.iter().skip(1) {
            attaches.push(text(overlay.target.clone())?);
        }
        attaches.push(text("dev".to_owned())?);
        attaches.push(text("sys".to_owned())?);
        if start.limits_dir.is_some() {
            attaches.push(text("sys/fs/cgroup".to_owned())?);
        }
        if start.memory_group.is_some() {
            attaches.push(text("sys/fs/cgroup/memory".to_owned())?);
        }
        let null = self.null.as_raw_fd();
        let mut tasks = [-1; MAX_TASKS];
        for (place, fd) in tasks.iter_mut().zip(start.tasks) {
            *place = fd.as_raw_fd();
        }
        let inherited = [
            null,
            null,
            self.log.as_raw_fd(),
            start.listener.as_raw_fd(),
            start.cgroup.map_or(null, |fd| fd.as_raw_fd()),
            start.config.as_raw_fd(),
            ready.as_raw_fd(),
            start.tether.as_raw_fd(),
        ];
        Ok(Box::new(Plan {
            parents_end: channel.0.as_raw_fd(),
            channel: channel.1.as_raw_fd(),
            staging: self.staging.clone(),
            attaches,
            shm_options: text(format!("size={},mode=1777", start.shm_bytes))?,
            masked_files: self.masked_files.clone(),
            masked_dirs: self.masked_dirs.clone(),
            read_only: self.read_only.clone(),
            hostname: text(start.hostname.to_owned())?,
            affinity: start.affinity.as_deref().map(cpu_set),
            tasks,
            inherited,
            program: self.program.as_raw_fd(),
            last_capability: self.last_capability,
            capabilities: start.capabilities,
            filter: self.filter.clone(),
            slot: Slot::default(),
        }))
    }

    /// What the parent does for the waiting child: maps, network, mounts.
    fn equip(
        &self,
        start: &Start<'_>,
        child: &Started,
        channel: &OwnedFd,
        connect: impl FnOnce(i32) -> io::Result<()>,
    ) -> Result<(), StepError> {
        let at = StepError::at;
        let pid = child.pid;
        let map = format!("0 {} {RANGE}", start.uid_base);
        fs::write(format!("/proc/{pid}/uid_map"), &map).map_err(at("write uid_map"))?;
        fs::write(format!("/proc/{pid}/gid_map"), &map).map_err(at("write gid_map"))?;
        connect(pid).map_err(at("connect the network"))?;
        let namespace = File::open(format!("/proc/{pid}/ns/user")).map_err(at("open the user namespace"))?;
        let mut mounts = Vec::with_capacity(MAX_MOUNTS);
        for overlay in start.overlays {
            mounts.push(mount_overlay(overlay, namespace.as_fd())?);
        }
        mounts.push(self.templates.dev(namespace.as_fd()).map_err(at("clone /dev"))?);
        mounts.push(self.templates.sys(namespace.as_fd()).map_err(at("clone /sys"))?);
        let quiet = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
        for dir in start.limits_dir.iter().chain(start.memory_group.iter()) {
            let tree = mount::clone_tree(dir).map_err(at("clone the cgroup's view"))?;
            mount::set_attributes(tree.as_fd(), quiet, None).map_err(at("make the cgroup's view read-only"))?;
            mounts.push(tree);
        }
        send(channel, &mounts).map_err(at("send the mounts"))
    }
}

/// Builds one overlay as the real root (so that opaque directories and whiteouts are exact), over id-mapped lower layers.
fn mount_overlay(overlay: &Overlay, namespace: BorrowedFd<'_>) -> Result<OwnedFd, StepError> {
    let at = StepError::at;
    let context = FsContext::open(c"overlay").map_err(at("open an overlay"))?;
    let mut layers = Vec::with_capacity(overlay.lower.len());
    for lower in &overlay.lower {
        let layer = mount::clone_tree(lower).map_err(at("clone a layer"))?;
        let attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV;
        mount::set_attributes(layer.as_fd(), attributes, Some(namespace)).map_err(at("id-map a layer"))?;
        context.set(c"lowerdir+", &by_descriptor(&layer)).map_err(at("add a lower layer"))?;
        layers.push(layer);
    }
    // By descriptor: the sandbox sees these options in its mountinfo, and the host's paths are none of its business.
    for (option, dir, step) in [
        (c"upperdir", &overlay.upper, "set the upper directory"),
        (c"workdir", &overlay.work, "set the work directory"),
    ] {
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
        let dir = rustix::fs::open(dir, flags, rustix::fs::Mode::empty()).map_err(|error| at(step)(error.into()))?;
        context.set(option, &by_descriptor(&dir)).map_err(at(step))?;
    }
    context.flag(c"volatile").map_err(at("set volatile"))?; // no sandbox outlives the machine: no sync is owed
    context.set(c"redirect_dir", c"on").map_err(at("set redirect_dir"))?; // an image's directory can be renamed
    context.set(c"metacopy", c"off").map_err(at("set metacopy"))?;
    context.set(c"index", c"off").map_err(at("set index"))?;
    context.mount(MOUNT_ATTR_NODEV).map_err(at("mount the overlay"))
}

fn by_descriptor(fd: &OwnedFd) -> CString {
    CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).expect("digits hold no NUL")
}

/// The kernel's bit mask of CPUs; those beyond it are left out.
fn cpu_set(cpus: &[usize]) -> CpuMask {
    let mut mask = CpuMask::default();
    for cpu in cpus {
        if let Some(word) = mask.get_mut(cpu / 64) {
            *word |= 1 << (cpu % 64);
        }
    }
    mask
}

fn channel() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    // If we are killed, the child sees no end of file as long as another waiting child holds a copy of our end.
    rustix::net::sockopt::set_socket_timeout(&theirs, rustix::net::sockopt::Timeout::Recv, Some(READY))?;
    Ok((ours, theirs))
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}

fn send(channel: &OwnedFd, mounts: &[OwnedFd]) -> io::Result<()> {
    let fds: Vec<BorrowedFd<'_>> = mounts.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MOUNTS))];
    let mut buffer = SendAncillaryBuffer::new(&mut space);
    if !buffer.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("more mounts than one message carries"));
    }
    rustix::net::sendmsg(channel, &[io::IoSlice::new(b"!")], &mut buffer, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn wait_ready(ready: &OwnedFd, slot: &Slot) -> Result<(), StepError> {
    let deadline = Instant::now() + READY;
    let at = StepError::at;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout =
            rustix::event::Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let mut poll = [rustix::event::PollFd::new(ready, rustix::event::PollFlags::IN)];
        match rustix::event::poll(&mut poll, Some(&timeout)) {
            Ok(0) => return Err(at("wait for sandboxd")(io::ErrorKind::TimedOut.into())),
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(at("wait for sandboxd")(error.into())),
        }
    }
    let mut byte = [0];
    match rustix::io::read(ready, &mut byte) {
        Ok(1) => Ok(()),
        Ok(_) => match slot.failure() {
            Some((step, errno)) => Err(StepError { step, source: io::Error::from_raw_os_error(errno) }),
            None => Err(at("start sandboxd")(io::Error::other("it ended before it was ready; its log says why"))),
        },
        Err(error) => Err(at("wait for sandboxd")(error.into())),
    }
}
