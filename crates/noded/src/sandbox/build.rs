//! The blocking path of a create: one straight line, undone as a whole when a step fails.

use std::{
    fs::{self, DirBuilder},
    io::{self, Write},
    net::Ipv4Addr,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{chown, DirBuilderExt},
    },
    path::Path,
    sync::Arc,
};

use rustix::fs::{MemfdFlags, SealFlags};
use sandmill_wire::{ApiError, DropTo, LeaseTerms, SandboxdConfig};

use super::{
    info::EnforcedLimits,
    node::Inner,
    record::Record,
    slots,
    spec::{NetworkMode, SandboxSpec, HOSTNAME},
};
use crate::{
    images::ResolvedImage,
    isolation::{
        cgroup,
        launch::{Overlay, Start, Started},
        process, remove, StepError,
    },
};

/// A sandbox whose sandboxd is ready.
pub struct Built {
    pub record: Record,
    pub pidfd: OwnedFd,
    pub image: Arc<ResolvedImage>,
}

/// A sandbox that belongs to nobody yet. Its sandboxd waits for its configuration; it ends by itself when noded does.
pub struct Warm {
    pub built: Built,
    /// Where the configuration is written.
    config: OwnedFd,
}

/// Makes one sandbox. On an error nothing of it is left.
pub fn build(
    node: &Inner,
    spec: &SandboxSpec,
    image: Arc<ResolvedImage>,
    slot: u32,
    created_at: f64,
) -> Result<Built, ApiError> {
    let config = config(spec, &image).and_then(|text| sealed(&text));
    let config = config.map_err(StepError::at("write sandboxd's configuration"))?;
    let built = raise(node, spec, image, slot, created_at, &config)?;
    let dir = node.sandbox_dir(&spec.id);
    match built.record.write(&dir) {
        Ok(()) => Ok(built),
        Err(error) => {
            discard(node, &built);
            Err(StepError::at("write state.json")(error).into())
        }
    }
}

/// Makes a sandbox for whoever asks for one like it. `spec` is that of nobody; its id names what is on the machine until then.
pub fn warm_up(node: &Inner, spec: &SandboxSpec, image: Arc<ResolvedImage>, slot: u32) -> Result<Warm, ApiError> {
    let pipe = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(io::Error::from);
    let (reader, config) = pipe.map_err(StepError::at("make the configuration's pipe"))?;
    let built = raise(node, spec, image, slot, super::unix_now(), &reader)?;
    if let Err(error) = Record::reserve(&node.sandbox_dir(&spec.id)) {
        discard(node, &built);
        return Err(StepError::at("make state.json")(error).into());
    }
    Ok(Warm { built, config })
}

/// Gives a warm sandbox to a caller. On an error nothing of it is left.
pub fn claim(node: &Inner, warm: Warm, spec: &SandboxSpec, created_at: f64) -> Result<Built, ApiError> {
    let Warm { mut built, config: pipe } = warm;
    let mut name = built.record.spec.id.clone();
    let given = (|| {
        let config = config(spec, &built.image)?;
        let (from, to) = (node.sandbox_dir(&name), node.sandbox_dir(&spec.id));
        fs::rename(&from, &to)?;
        name.clone_from(&spec.id);
        let record = &mut built.record;
        record.moved(&from, &to);
        record.spec = spec.clone();
        record.created_at = created_at;
        record.started_at = super::unix_now();
        record.write(&to)?;
        fs::File::from(pipe).write_all(&config)
    })();
    match given {
        Ok(()) => Ok(built),
        Err(error) => {
            built.record.spec.id = name;
            discard(node, &built);
            Err(StepError::at("hand a warm sandbox over")(error).into())
        }
    }
}

/// Ends a sandbox that nobody has heard of, and removes all of it.
pub fn discard(node: &Inner, built: &Built) {
    let _ = process::signal(&built.pidfd, libc::SIGKILL);
    process::wait(&built.pidfd, 10_000);
    process::poll(&built.pidfd);
    undo(node, &node.sandbox_dir(&built.record.spec.id), &built.record);
}

fn raise(
    node: &Inner,
    spec: &SandboxSpec,
    image: Arc<ResolvedImage>,
    slot: u32,
    created_at: f64,
    config: &OwnedFd,
) -> Result<Built, ApiError> {
    let dir = node.sandbox_dir(&spec.id);
    let mut record = Record::new(spec.clone(), node.boot_id.clone(), image.id.clone(), slot, created_at);
    match assemble(node, &dir, &image, &mut record, config) {
        Ok(started) => Ok(Built { record, pidfd: started.pidfd, image }),
        Err(error) => {
            undo(node, &dir, &record);
            Err(error)
        }
    }
}

/// Removes what a create that failed has made. Its processes are gone.
fn undo(node: &Inner, dir: &Path, record: &Record) {
    if let Err(error) = node.network.detach(&record.spec.id) {
        eprintln!("noded: the network of a failed create stays: {error}");
    }
    for path in node.cgroups.remove(&record.group) {
        eprintln!("noded: the cgroup {} of a failed create stays", path.display());
    }
    if let Some(disk) = &record.disk {
        if let Err(error) = node.disks.remove(disk) {
            eprintln!("noded: the disk {} of a failed create stays: {error}", disk.root.display());
        }
    }
    if let Err(error) = remove::tree(dir) {
        eprintln!("noded: {} of a failed create stays: {error}", dir.display());
    }
}

fn assemble(
    node: &Inner,
    dir: &Path,
    image: &ResolvedImage,
    record: &mut Record,
    config: &OwnedFd,
) -> Result<Started, ApiError> {
    let at = StepError::at;
    let spec = record.spec.clone();
    let uid_base = slots::uid_base(record.slot);
    DirBuilder::new().mode(0o700).create(dir).map_err(at("make the sandbox's directory"))?;

    let disk = node.disks.make(&spec.id, dir, spec.limits.disk_bytes, spec.limits.inodes)?;
    let overlays = overlays(&disk.root, image, uid_base, node.ground.templates.furnishing())?;
    record.uppers =
        image.trees.iter().zip(&overlays).map(|(tree, overlay)| (tree.target.clone(), overlay.upper.clone())).collect();
    record.disk = Some(disk);
    if spec.network == NetworkMode::All {
        let reserved = node.network.reserve(record.slot)?;
        record.ip = Some(reserved.ip);
        record.dns = Some(reserved.dns);
    }
    if let Some(root) = overlays.first() {
        furnish(&root.upper, record, uid_base).map_err(at("write /etc"))?;
    }
    let limits = enforced(node, record);
    let wanted =
        cgroup::Limits { cpu: spec.limits.cpu, memory_bytes: spec.limits.memory_bytes, pids: Some(spec.limits.pids()) };
    record.group = node.cgroups.create(&spec.id, wanted, uid_base)?;

    let listener = crate::local_socket::bind(dir, "sandboxd.sock").map_err(at("bind sandboxd.sock"))?;
    let group_dir = record.group.open().map_err(at("open the cgroup"))?;
    let tasks = record.group.tasks().map_err(at("open the cgroups"))?;
    let view = node.ground.templates.limits(limits.cpu, limits.memory_bytes, limits.pids);
    let view = view.map_err(at("show the limits"))?;
    let start = Start {
        overlays: &overlays,
        uid_base,
        hostname: spec.hostname(),
        shm_bytes: spec.limits.shm(),
        limits_dir: Some(&view),
        memory_group: record.group.memory_v1.as_deref(),
        affinity: affinity(spec.limits.cpu, record.slot),
        listener: listener.as_fd(),
        cgroup: group_dir.as_ref().map(AsFd::as_fd),
        tasks: &tasks,
        config: config.as_fd(),
        tether: node.tether.0.as_fd(),
        capabilities: DropTo::default().bounding,
    };
    let mut unconnected = None;
    let connect = |pid: i32| {
        if spec.network == NetworkMode::All {
            let namespace = fs::File::open(format!("/proc/{pid}/ns/net"))?;
            if let Err(error) = node.network.attach(&spec.id, record.slot, namespace.as_fd()) {
                unconnected = Some(error);
                return Err(io::ErrorKind::NetworkUnreachable.into());
            }
        }
        Ok(())
    };
    // An error of the network's own says more than the step that it stopped.
    let started = node.ground.start(&start, connect).map_err(|error| unconnected.unwrap_or_else(|| error.into()))?;
    let finished = (|| {
        if let Some(bytes) = spec.limits.memory_bytes {
            node.cgroups.limit_memory(&record.group, bytes)?;
        }
        record.started_at = super::unix_now();
        record.pid = started.pid;
        record.start_time = process::start_time(started.pid).map_err(at("read sandboxd's start time"))?;
        record.limits = Some(limits);
        Ok::<_, StepError>(())
    })();
    if let Err(error) = finished {
        let _ = process::signal(&started.pidfd, libc::SIGKILL);
        process::wait(&started.pidfd, 10_000);
        process::poll(&started.pidfd);
        return Err(error.into());
    }
    Ok(started)
}

/// The directories of each tree's overlay. Work directories are the mounter's own; upper ones belong to the sandbox's root.
/// The furnishing lies on top of the root's layers, whatever the image has in its place.
fn overlays(root: &Path, image: &ResolvedImage, uid_base: u32, furnishing: &Path) -> Result<Vec<Overlay>, StepError> {
    let mut overlays = Vec::with_capacity(image.trees.len());
    for tree in &image.trees {
        let target = tree.target.strip_prefix("/").unwrap_or(&tree.target).to_string_lossy().into_owned();
        let name = if target.is_empty() { "root".to_owned() } else { target.replace('/', "-") };
        let (upper, work) = (root.join(format!("upper-{name}")), root.join(format!("work-{name}")));
        let mut builder = DirBuilder::new();
        let made = builder
            .mode(0o755)
            .create(&upper)
            .and_then(|()| chown(&upper, Some(uid_base), Some(uid_base)))
            .and_then(|()| builder.create(&work));
        made.map_err(StepError::at("make the upper directories"))?;
        let own = target.is_empty().then(|| furnishing.to_owned());
        let lower = own.into_iter().chain(tree.lower.iter().cloned()).collect();
        overlays.push(Overlay { target, lower, upper, work });
    }
    Ok(overlays)
}

/// Files of /etc that differ from the furnishing's, in the sandbox's own upper directory.
fn furnish(upper: &Path, record: &Record, uid_base: u32) -> io::Result<()> {
    let usual = etc(HOSTNAME, None);
    let own = etc(record.spec.hostname(), record.dns);
    let changed: Vec<_> = own.iter().zip(&usual).filter(|(own, usual)| own != usual).map(|(own, _)| own).collect();
    if changed.is_empty() {
        return Ok(());
    }
    let dir = upper.join("etc");
    DirBuilder::new().mode(0o755).create(&dir)?;
    chown(&dir, Some(uid_base), Some(uid_base))?;
    for (name, text) in changed {
        fs::write(dir.join(name), text)?;
        chown(dir.join(name), Some(uid_base), Some(uid_base))?;
    }
    Ok(())
}

/// Who and where a sandbox is. Regular files, so that a program can edit or replace them; a commit leaves them out.
pub fn etc(hostname: &str, dns: Option<Ipv4Addr>) -> [(&'static str, String); 3] {
    let hosts = format!("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{hostname}\n");
    let resolv = match dns {
        Some(dns) => format!("nameserver {dns}\n"),
        None => "# No network: there is no name server.\noptions timeout:1 attempts:1\n".to_owned(),
    };
    [("hosts", hosts), ("hostname", format!("{hostname}\n")), ("resolv.conf", resolv)]
}

/// Removes the /etc that [`furnish`] made from an upper directory that becomes a layer, if nothing else is in it.
pub fn strip(upper: &Path, record: &Record) {
    for (name, text) in etc(record.spec.hostname(), record.dns) {
        let path = upper.join("etc").join(name);
        if fs::symlink_metadata(&path).is_ok_and(|found| found.is_file() && found.len() == text.len() as u64)
            && fs::read(&path).is_ok_and(|found| found == text.as_bytes())
        {
            let _ = fs::remove_file(&path);
        }
    }
    let _ = fs::remove_dir(upper.join("etc")); // fails where something is in it: that belongs to the layer
}

fn enforced(node: &Inner, record: &Record) -> EnforcedLimits {
    let (limits, disk) = (&record.spec.limits, record.disk.as_ref());
    let by = |limit: &'static str, asked: bool| if asked { node.cgroups.enforced_by(limit) } else { "none" };
    let enforced_by = [
        ("cpu", by("cpu", limits.cpu.is_some())),
        ("memory", by("memory", limits.memory_bytes.is_some())),
        ("pids", by("pids", true)),
        ("disk", disk.filter(|_| limits.disk_bytes.is_some()).map_or("none", |disk| disk.bytes_enforced_by())),
        ("inodes", disk.filter(|_| limits.inodes.is_some()).map_or("none", |disk| disk.inodes_enforced_by())),
    ];
    EnforcedLimits {
        cpu: limits.cpu,
        memory_bytes: limits.memory_bytes,
        pids: Some(limits.pids()),
        disk_bytes: limits.disk_bytes,
        inodes: limits.inodes,
        shm_bytes: limits.shm(),
        enforced_by: enforced_by.map(|(name, by)| (name.to_owned(), by.to_owned())).into(),
    }
}

/// What sandboxd is told, as JSON.
fn config(spec: &SandboxSpec, image: &ResolvedImage) -> io::Result<Vec<u8>> {
    let config = SandboxdConfig {
        id: spec.id.clone(),
        hostname: spec.hostname().to_owned(),
        token: None, // the gateway checks it; nothing inside needs to know it
        env: spec.env.clone(),
        image_env: image.config.env.clone(),
        workdir: spec.workdir.clone().or_else(|| image.config.workdir.clone()),
        user: spec.user.clone().or_else(|| image.config.user.clone()),
        memory_limit_bytes: spec.limits.memory_bytes,
        cpus: spec.limits.cpu,
        pids: Some(spec.limits.pids()),
        lease: Some(LeaseTerms { ttl_s: spec.lease.ttl_s, renew_on_use: spec.lease.renew_on_use }),
        drop_to: DropTo::default(),
    };
    Ok(serde_json::to_vec(&config)?)
}

/// A memfd that nobody can change any more.
fn sealed(text: &[u8]) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("sandboxd-config", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = fs::File::from(fd);
    file.write_all(text)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE)?;
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
    Ok(file.into())
}

/// With fewer cores than the machine has: which ones, so that what counts CPUs counts right. Neighbours get others.
fn affinity(cpu: Option<f64>, slot: u32) -> Option<Vec<usize>> {
    let wanted = cpu?.ceil() as usize;
    let own = rustix::thread::sched_getaffinity(None).ok()?;
    let all: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| own.is_set(*cpu)).collect();
    if wanted >= all.len() {
        return None;
    }
    Some((0..wanted).map(|n| all[(slot as usize * wanted + n) % all.len()]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unchanged_etc_is_no_change() {
        let upper = tempfile::tempdir().unwrap();
        let own = rustix::process::getuid().as_raw();
        let mut record = Record::sample();
        furnish(upper.path(), &record, own).unwrap();
        assert_eq!(fs::read_dir(upper.path()).unwrap().count(), 0, "all of it is in the furnishing");
        record.spec.hostname = Some("other".to_owned());
        furnish(upper.path(), &record, own).unwrap();
        strip(upper.path(), &record);
        assert_eq!(fs::read_dir(upper.path()).unwrap().count(), 0);
        furnish(upper.path(), &record, own).unwrap();
        fs::write(upper.path().join("etc/hosts"), "1.2.3.4 x\n").unwrap();
        strip(upper.path(), &record);
        let left: Vec<_> = fs::read_dir(upper.path().join("etc")).unwrap().map(|e| e.unwrap().path()).collect();
        assert_eq!(left, [upper.path().join("etc/hosts")]);
    }

    #[test]
    fn few_cores_are_pinned() {
        assert_eq!(affinity(None, 0), None);
        assert_eq!(affinity(Some(4096.0), 0), None);
    }
}
