//! The registry: which sandboxes there are, in which phase, and every call on them.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicUsize, Ordering},
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
    },
    time::{Duration, Instant},
};

use sandmill_wire::ApiError;
use serde::Deserialize;
use tokio::sync::{oneshot, watch, Semaphore};

use super::{
    adopt,
    build::{self, Built, Warm},
    ended::Ended,
    events::Events,
    info::{Cause, NetworkInfo, SandboxEnd, SandboxInfo, Usage},
    lease::{self, Lease},
    record::Record,
    slots::{Slots, SLOTS},
    spec::{self, SandboxSpec},
    talk::{self, Inside},
    teardown::{self, teardown},
    warm,
};
use crate::{
    gateway::{Directory, Route},
    images::{CommitOptions, ConfigChange, ImageInfo, ResolvedImage, Store},
    isolation::{cgroup::Cgroups, disk::Disks, launch::Ground, process},
    network::Network,
};

/// Creates that wait for admission, at most.
const WAITING: usize = 20_000;
/// How long a sandboxd may take to accept its tether.
const TIE: Duration = Duration::from_secs(10);
/// How long after a create the warm pool waits with its own work: the caller's first call comes now.
const FIRST_CALL: Duration = Duration::from_millis(5);
/// How long a sandboxd may take to say what it sees.
const ANSWER: Duration = Duration::from_millis(500);

pub struct Options {
    pub dir: PathBuf,
    pub sandboxd: PathBuf,
    pub max_starting: usize,
    /// Warm sandboxes kept, at most.
    pub max_warm: usize,
}

/// All sandboxes of this node. Cloning is cheap; all clones are the same.
#[derive(Clone)]
pub struct Node(Arc<Inner>);

pub struct Inner {
    pub dir: PathBuf,
    pub sandboxes: PathBuf,
    pub boot_id: String,
    node_id: String,
    pub store: Store,
    pub ground: Ground,
    pub cgroups: Cgroups,
    pub disks: Disks,
    pub network: Network,
    pub ended: Ended,
    events: Events,
    /// Never held over an await or a system call.
    table: Mutex<Table>,
    starting: Semaphore,
    waiting: AtomicUsize,
    /// Never held over an await or a system call.
    warm: Mutex<warm::Pool>,
    /// Held while a warm sandbox is made: one at a time.
    warming: tokio::sync::Mutex<()>,
    warm_names: AtomicUsize,
    /// Both ends of a pipe: sandboxes hold the reading one and see its end when noded ends, however that happens.
    pub tether: (OwnedFd, OwnedFd),
}

#[derive(Default)]
struct Table {
    sandboxes: HashMap<String, Arc<Sandbox>>,
    slots: Slots,
    /// No more creates: noded ends.
    closed: bool,
}

/// One sandbox, from its create until nothing of it is left.
pub struct Sandbox {
    pub spec: SandboxSpec,
    pub created_at: f64,
    pub lease: Lease,
    life: watch::Sender<Life>,
    /// Set when it runs.
    body: OnceLock<Body>,
    /// Why it is to end, when that is asked for before it runs.
    cancelled: OnceLock<Cause>,
}

#[derive(Debug, Clone)]
enum Life {
    Starting,
    Running,
    Ending,
    Gone,
    Failed(ApiError),
}

struct Body {
    record: Record,
    pidfd: Arc<OwnedFd>,
    image: Option<Arc<ResolvedImage>>,
}

/// Body of a commit call.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CommitCall {
    name: Option<String>,
    config: Option<ConfigChange>,
}

type CommitReply = oneshot::Sender<Result<ImageInfo, ApiError>>;

impl Sandbox {
    fn new(spec: SandboxSpec, created_at: f64, lease: Option<lease::Kept>) -> Self {
        let lease = match lease {
            Some(kept) => Lease::again(kept),
            None => Lease::new(spec.lease.ttl_s, spec.lease.renew_on_use),
        };
        let life = watch::channel(Life::Starting).0;
        Self { spec, created_at, lease, life, body: OnceLock::new(), cancelled: OnceLock::new() }
    }

    fn is_running(&self) -> bool {
        matches!(*self.life.borrow(), Life::Running)
    }

    fn info(&self) -> Option<SandboxInfo> {
        let record = &self.body.get()?.record;
        let spec = &self.spec;
        Some(SandboxInfo {
            id: spec.id.clone(),
            state: "running",
            image: record.image.clone(),
            created_at: self.created_at,
            started_at: record.started_at,
            expires_at: super::unix_now() + self.lease.expires_s() - process::boottime_s(),
            pid: record.pid,
            limits: record.limits.clone()?,
            network: NetworkInfo { mode: spec.network, ip: record.ip },
            env: spec.env.clone(),
            workdir: spec.workdir.clone(),
            user: spec.user.clone(),
        })
    }

    /// Waits until nothing of it is left.
    async fn gone(&self) {
        let mut life = self.life.subscribe();
        // The sender lives as long as `self`.
        let _ = life.wait_for(|life| matches!(life, Life::Gone | Life::Failed(_))).await;
    }
}

impl Inner {
    pub fn sandbox_dir(&self, id: &str) -> PathBuf {
        self.sandboxes.join(id)
    }

    fn warm(&self) -> MutexGuard<'_, warm::Pool> {
        self.warm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a sandbox for a create that has been admitted: a warm one that fits, else a new one. Blocks.
    fn make(&self, spec: &SandboxSpec, created_at: f64) -> Result<Built, ApiError> {
        let image = self.store.resolve(&spec.image)?;
        if let Some(shape) = warm::Shape::of(spec, &image) {
            self.warm().asked(&shape, &image, Instant::now());
        }
        if let Some(ready) = self.ready(spec, &image) {
            return self.claim(ready, spec, created_at);
        }
        let slot = self.take_slot()?;
        build::build(self, spec, image, slot, created_at).inspect_err(|_| self.table().slots.give_back(slot))
    }

    /// A warm sandbox that is what `spec` asks for, and lives.
    fn ready(&self, spec: &SandboxSpec, image: &Arc<ResolvedImage>) -> Option<Warm> {
        let shape = warm::Shape::of(spec, image)?;
        loop {
            let ready = self.warm().take(&shape, image, Instant::now())?;
            if process::poll(&ready.built.pidfd) == process::Ended::No {
                return Some(ready);
            }
            self.drop_warm(ready);
        }
    }

    fn claim(&self, warm: Warm, spec: &SandboxSpec, created_at: f64) -> Result<Built, ApiError> {
        let slot = warm.built.record.slot;
        build::claim(self, warm, spec, created_at).inspect_err(|_| self.table().slots.give_back(slot))
    }

    fn take_slot(&self) -> Result<u32, ApiError> {
        let slot = self.table().slots.take();
        slot.ok_or_else(|| ApiError::new(503, "node_full", format!("all {SLOTS} id ranges are in use")).retryable())
    }

    fn drop_warm(&self, warm: Warm) {
        build::discard(self, &warm.built);
        self.table().slots.give_back(warm.built.record.slot);
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Each change of the table is complete before anything that can panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Node {
    /// Prepares the machine and takes over what an earlier noded left. Blocks.
    pub fn open(options: Options, store: Store) -> Result<(Self, Vec<adopt::Survivor>), String> {
        let said = |what: &'static str| move |error: io::Error| format!("cannot {what}: {error}");
        let dir = options.dir;
        let sandboxes = dir.join("sandboxes");
        fs::create_dir_all(&sandboxes).map_err(said("make DIR/sandboxes"))?;
        crate::state_dir::spread(&sandboxes);
        let boot_id = process::boot_id().map_err(said("read the boot id"))?;
        let node_id = node_id(&dir);
        let ground = Ground::prepare(&dir.join("templates"), &options.sandboxd, &dir.join("sandboxd.log"));
        let ground = ground.map_err(|error| format!("cannot prepare for {}: {error}", options.sandboxd.display()))?;
        ground
            .templates
            .furnish(&build::etc(spec::HOSTNAME, None))
            .map_err(said("make the furnishing of sandboxes"))?;
        let inner = Inner {
            sandboxes,
            boot_id,
            cgroups: Cgroups::detect(&node_id),
            node_id,
            store,
            ground,
            disks: Disks::new(&dir),
            network: Network::new(&dir),
            ended: Ended::open(&dir),
            events: Events::new(),
            table: Mutex::default(),
            starting: Semaphore::new(options.max_starting),
            waiting: AtomicUsize::new(0),
            warm: Mutex::new(warm::Pool::new(options.max_warm)),
            warming: tokio::sync::Mutex::new(()),
            warm_names: AtomicUsize::new(0),
            tether: rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
                .map_err(|error| format!("cannot make a pipe: {error}"))?,
            dir,
        };
        let survivors = adopt::adopt(&inner).map_err(said("take over the sandboxes of an earlier noded"))?;
        Ok((Self(Arc::new(inner)), survivors))
    }

    /// Takes up work: the survivors are watched, leases are swept.
    pub fn start(&self, survivors: Vec<adopt::Survivor>) {
        for survivor in survivors {
            let record = survivor.record;
            let id = record.spec.id.clone();
            let sandbox = Arc::new(Sandbox::new(record.spec.clone(), record.created_at, survivor.lease));
            {
                let mut table = self.0.table();
                table.slots.claim(record.slot);
                table.sandboxes.insert(id, Arc::clone(&sandbox));
            }
            let _ = sandbox.body.set(Body { record, pidfd: Arc::new(survivor.pidfd), image: survivor.image });
            sandbox.life.send_replace(Life::Running);
            tokio::spawn(self.clone().tie(Arc::clone(&sandbox)));
            tokio::spawn(self.clone().watch(sandbox));
        }
        tokio::spawn(lease::sweep(self.clone()));
    }

    pub fn dir(&self) -> &Path {
        &self.0.dir
    }

    pub fn node_id(&self) -> &str {
        &self.0.node_id
    }

    pub fn boot_id(&self) -> &str {
        &self.0.boot_id
    }

    pub fn cgroup_kind(&self) -> &'static str {
        self.0.cgroups.kind().name()
    }

    pub fn count(&self) -> usize {
        self.0.table().sandboxes.len()
    }

    pub fn events(&self) -> &Events {
        &self.0.events
    }

    pub fn ended(&self) -> Vec<SandboxEnd> {
        self.0.ended.all()
    }

    pub fn sandbox_dir(&self, id: &str) -> PathBuf {
        self.0.sandbox_dir(id)
    }

    /// Those that run now.
    pub fn running(&self) -> Vec<Arc<Sandbox>> {
        self.0.table().sandboxes.values().filter(|sandbox| sandbox.is_running()).cloned().collect()
    }

    pub fn list(&self) -> Vec<SandboxInfo> {
        self.running().iter().filter_map(|sandbox| sandbox.info()).collect()
    }

    pub fn get(&self, id: &str) -> Result<SandboxInfo, ApiError> {
        self.find_running(id)?.info().ok_or_else(|| self.missing(id))
    }

    /// Waits for one that is ending to be gone, so that who asks hears why: its clients ask as soon as its connections break.
    pub async fn settle(&self, id: &str) {
        let found = self.0.table().sandboxes.get(id).cloned();
        if let Some(sandbox) = found {
            let ending = matches!(*sandbox.life.borrow(), Life::Ending);
            if ending {
                sandbox.gone().await;
            }
        }
    }

    fn find(&self, id: &str) -> Result<Arc<Sandbox>, ApiError> {
        let found = self.0.table().sandboxes.get(id).cloned();
        found.ok_or_else(|| self.missing(id))
    }

    fn find_running(&self, id: &str) -> Result<Arc<Sandbox>, ApiError> {
        let sandbox = self.find(id)?;
        let life = sandbox.life.borrow().clone();
        match life {
            Life::Running => Ok(sandbox),
            Life::Starting => {
                Err(ApiError::new(409, "sandbox_starting", format!("sandbox {id} is still starting")).retryable())
            }
            _ => Err(self.missing(id)),
        }
    }

    fn missing(&self, id: &str) -> ApiError {
        match self.0.ended.get(id) {
            Some(end) => ApiError::new(410, "sandbox_gone", format!("sandbox {id} is gone: {}", end.message))
                .details(serde_json::to_value(end).unwrap_or_default()),
            None => ApiError::new(404, "sandbox_not_found", format!("there is no sandbox {id}"))
                .hint("`sandmill ls` lists them"),
        }
    }

    /// Makes a sandbox and answers when its sandboxd accepts connections. True: it is new; false: it was there already, or
    /// another call with the same id has made it.
    ///
    /// The work goes on when the caller goes away: a second call finds it, a DELETE undoes it, or its lease ends.
    pub async fn create(&self, spec: SandboxSpec) -> Result<(SandboxInfo, bool), ApiError> {
        spec.check()?;
        let id = spec.id.clone();
        let (sandbox, new) = self.enter(spec)?;
        if new && !self.claim_at_once(&sandbox) {
            tokio::spawn(self.clone().bring_up(Arc::clone(&sandbox)));
        }
        let mut life = sandbox.life.subscribe();
        // The sender lives as long as `sandbox`.
        let _ = life.wait_for(|life| !matches!(life, Life::Starting)).await;
        let life = life.borrow().clone();
        match life {
            Life::Failed(error) => Err(error),
            Life::Running => sandbox.info().map(|info| (info, new)).ok_or_else(|| self.missing(&id)),
            _ => Err(self.missing(&id)),
        }
    }

    fn enter(&self, spec: SandboxSpec) -> Result<(Arc<Sandbox>, bool), ApiError> {
        let mut table = self.0.table();
        if let Some(existing) = table.sandboxes.get(&spec.id) {
            return Ok((Arc::clone(existing), false));
        }
        if self.0.ended.get(&spec.id).is_some() {
            drop(table);
            return Err(self.missing(&spec.id)); // never made again, blank, under the same id
        }
        if table.closed {
            return Err(ApiError::new(503, "node_stopping", "this node is shutting down").retryable());
        }
        if self.0.waiting.load(Ordering::Relaxed) >= WAITING {
            return Err(ApiError::new(503, "node_busy", format!("{WAITING} creates wait already"))
                .hint("create fewer at once, or add a node")
                .retryable());
        }
        let sandbox = Arc::new(Sandbox::new(spec, super::unix_now(), None));
        table.sandboxes.insert(sandbox.spec.id.clone(), Arc::clone(&sandbox));
        self.0.waiting.fetch_add(1, Ordering::Relaxed);
        Ok((sandbox, true))
    }

    /// Takes a warm sandbox without a turn of another thread, if nothing is in the way. False: it has to be brought up.
    fn claim_at_once(&self, sandbox: &Arc<Sandbox>) -> bool {
        let Ok(permit) = self.0.starting.try_acquire() else { return false };
        let claimed = tokio::task::block_in_place(|| {
            let image = self.0.store.resolve(&sandbox.spec.image).ok()?;
            let ready = self.0.ready(&sandbox.spec, &image)?;
            Some(self.0.claim(ready, &sandbox.spec, sandbox.created_at))
        });
        drop(permit);
        let Some(outcome) = claimed else { return false };
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
        self.arrive(Arc::clone(sandbox), outcome);
        true
    }

    async fn bring_up(self, sandbox: Arc<Sandbox>) {
        let permit = self.0.starting.acquire().await;
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
        let outcome = if sandbox.cancelled.get().is_some() {
            Err(cancelled())
        } else {
            let (node, of) = (Arc::clone(&self.0), Arc::clone(&sandbox));
            let work = tokio::task::spawn_blocking(move || node.make(&of.spec, of.created_at));
            work.await
                .unwrap_or_else(|_| Err(ApiError::new(500, "internal", "the create failed; noded's log says where")))
        };
        drop(permit);
        self.arrive(sandbox, outcome);
    }

    /// A create is through, either way.
    fn arrive(&self, sandbox: Arc<Sandbox>, outcome: Result<Built, ApiError>) {
        match outcome {
            Ok(Built { record, pidfd, image }) => {
                // From readiness on the lease counts, not from when it was queued.
                sandbox.lease.renew(sandbox.spec.lease.ttl_s, None);
                let _ = sandbox.body.set(Body { record, pidfd: Arc::new(pidfd), image: Some(image) });
                sandbox.life.send_replace(Life::Running);
                if let Some(cause) = sandbox.cancelled.get() {
                    self.end(&sandbox, *cause);
                }
                tokio::spawn(self.clone().warm_up());
                tokio::spawn(self.clone().watch(sandbox));
            }
            Err(error) => {
                self.0.table().sandboxes.remove(&sandbox.spec.id);
                sandbox.life.send_replace(Life::Failed(error));
            }
        }
    }

    /// Ties a sandbox that another noded made, or whose terms have changed.
    async fn tie(self, sandbox: Arc<Sandbox>) {
        let lease = sandbox.lease.kept();
        let dir = self.sandbox_dir(&sandbox.spec.id);
        let tied = talk::tie(&dir, &self.0.tether.0, lease.ttl_s, lease.renew_on_use);
        let tied = tokio::time::timeout(TIE, tied).await.unwrap_or(Err(io::ErrorKind::TimedOut.into()));
        if let (Err(error), true) = (tied, sandbox.is_running()) {
            eprintln!("noded: {}: it will not notice if noded never comes back: {error}", sandbox.spec.id);
        }
    }

    /// Makes what the warm pool lacks, as long as nothing that was asked for wants to start.
    async fn warm_up(self) {
        let Ok(_one) = self.0.warming.try_lock() else { return };
        tokio::time::sleep(FIRST_CALL).await;
        loop {
            let Ok(_permit) = self.0.starting.try_acquire() else { return };
            let Some((shape, image)) = self.0.warm().missing(Instant::now()) else { return };
            let Ok(slot) = self.0.take_slot() else { return };
            let number = self.0.warm_names.fetch_add(1, Ordering::Relaxed);
            let spec = shape.spec(format!("warm-{}-{number}", std::process::id()));
            let node = Arc::clone(&self.0);
            let work = tokio::task::spawn_blocking(move || match build::warm_up(&node, &spec, image, slot) {
                Ok(warm) => {
                    node.warm().put(shape, warm, Instant::now());
                    true
                }
                Err(error) => {
                    eprintln!("noded: a warm sandbox could not be made: {error}");
                    node.table().slots.give_back(slot);
                    false
                }
            });
            if !work.await.unwrap_or(false) {
                return; // the next create says why to somebody
            }
        }
    }

    /// Removes warm sandboxes that nobody needed for long.
    pub async fn cool_down(&self) {
        let stale = self.0.warm().stale(Instant::now());
        self.drop_warm(stale).await;
    }

    /// Removes all warm sandboxes: they hold their images.
    pub async fn forget_warm(&self) {
        let _one = self.0.warming.lock().await;
        let all = self.0.warm().clear();
        self.drop_warm(all).await;
    }

    async fn drop_warm(&self, warm: Vec<Warm>) {
        for one in warm {
            let node = Arc::clone(&self.0);
            let _ = tokio::task::spawn_blocking(move || node.drop_warm(one)).await;
        }
    }

    pub fn warm_count(&self) -> usize {
        self.0.warm().len()
    }

    /// Waits for sandboxd to end by itself.
    async fn watch(self, sandbox: Arc<Sandbox>) {
        let Some(body) = sandbox.body.get() else { return };
        let mut life = sandbox.life.subscribe();
        let ended = async {
            if let Err(error) = process::ended(Arc::clone(&body.pidfd)).await {
                eprintln!("noded: {}: its end will not be noticed: {error}", sandbox.spec.id);
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = ended => self.end(&sandbox, Cause::Crashed),
            _ = life.wait_for(|life| !matches!(life, Life::Running)) => {}
        }
    }

    /// Begins the end of a sandbox that runs; the first cause wins.
    pub fn end(&self, sandbox: &Arc<Sandbox>, cause: Cause) {
        self.end_with(sandbox, cause, None);
    }

    /// False: it was not running any more.
    fn end_with(&self, sandbox: &Arc<Sandbox>, cause: Cause, commit: Option<(CommitOptions, CommitReply)>) -> bool {
        let first = sandbox.life.send_if_modified(|life| {
            let running = matches!(life, Life::Running);
            if running {
                *life = Life::Ending;
            }
            running
        });
        if first {
            let (node, sandbox) = (self.clone(), Arc::clone(sandbox));
            tokio::spawn(async move {
                let (inner, of) = (Arc::clone(&node.0), Arc::clone(&sandbox));
                let work = tokio::task::spawn_blocking(move || take_down(&inner, &of, cause, commit));
                if work.await.is_err() {
                    eprintln!("noded: {}: its end failed half-way; the next start finishes it", sandbox.spec.id);
                }
                let mut table = node.0.table();
                table.sandboxes.remove(&sandbox.spec.id);
                if let Some(body) = sandbox.body.get() {
                    table.slots.give_back(body.record.slot);
                }
                drop(table);
                sandbox.life.send_replace(Life::Gone);
            });
        }
        first
    }

    /// Ends a sandbox and answers when nothing of it is left. One that is still starting is undone.
    pub async fn delete(&self, id: &str, cause: Cause) -> Result<(), ApiError> {
        let sandbox = self.find(id)?;
        let _ = sandbox.cancelled.set(cause);
        self.end(&sandbox, cause);
        sandbox.gone().await;
        Ok(())
    }

    pub fn renew(&self, id: &str, ttl_s: f64, renew_on_use: Option<bool>) -> Result<SandboxInfo, ApiError> {
        spec::check_ttl(ttl_s)?;
        let sandbox = self.find_running(id)?;
        self.renew_one(&sandbox, ttl_s, renew_on_use);
        sandbox.info().ok_or_else(|| self.missing(id))
    }

    fn renew_one(&self, sandbox: &Arc<Sandbox>, ttl_s: f64, renew_on_use: Option<bool>) {
        if sandbox.lease.renew(ttl_s, renew_on_use) {
            tokio::spawn(self.clone().tie(Arc::clone(sandbox)));
        }
    }

    /// Renews many; answers those that are not there.
    pub fn renew_many(&self, leases: &BTreeMap<String, f64>) -> Result<Vec<String>, ApiError> {
        for ttl_s in leases.values() {
            spec::check_ttl(*ttl_s)?;
        }
        let mut gone = Vec::new();
        for (id, ttl_s) in leases {
            match self.find_running(id) {
                Ok(sandbox) => self.renew_one(&sandbox, *ttl_s, None),
                Err(error) if error.retryable => {} // starting: its lease begins with its readiness
                Err(_) => gone.push(id.clone()),
            }
        }
        Ok(gone)
    }

    pub async fn usage(&self, id: &str) -> Result<Usage, ApiError> {
        let sandbox = self.find_running(id)?;
        let dir = self.sandbox_dir(id);
        let inside: Inside = talk::ask(&dir, "/sandmill/v1/usage", ANSWER).await.unwrap_or_default();
        let (inner, of) = (Arc::clone(&self.0), Arc::clone(&sandbox));
        let look = move || {
            let body = of.body.get()?;
            let disk = body.record.disk.as_ref();
            Some((body.record.group.account(), disk.and_then(|disk| inner.disks.used_bytes(disk))))
        };
        let looked = tokio::task::spawn_blocking(look).await.ok().flatten();
        let (account, disk_bytes) = looked.ok_or_else(|| self.missing(id))?;
        let limits = &sandbox.spec.limits;
        Ok(Usage {
            cpu_s: if account.cpu_s > 0.0 { account.cpu_s } else { inside.cpu_s },
            memory_bytes: account.memory_bytes,
            memory_peak_bytes: account.memory_peak_bytes.max(account.memory_bytes),
            memory_limit_bytes: limits.memory_bytes,
            pids: if account.pids > 0 { account.pids } else { inside.pids },
            io_read_bytes: inside.io_read_bytes,
            io_write_bytes: inside.io_write_bytes,
            // Without a limit of its own its changes lie among everything else; walking them is no matter of a usage call.
            disk_bytes: disk_bytes.or(limits.disk_bytes.map(|_| inside.disk_bytes)),
            disk_limit_bytes: limits.disk_bytes,
            oom_kills: account.oom_kills,
            at: super::unix_now(),
        })
    }

    /// Ends a sandbox; its changes become a layer on top of its image.
    pub async fn commit(&self, id: &str, call: CommitCall) -> Result<ImageInfo, ApiError> {
        let sandbox = self.find_running(id)?;
        let options = CommitOptions { name: call.name, config: call.config.unwrap_or_default() };
        let (reply, answer) = oneshot::channel();
        if !self.end_with(&sandbox, Cause::Committed, Some((options, reply))) {
            return Err(self.missing(id));
        }
        let image =
            answer.await.unwrap_or_else(|_| Err(ApiError::new(500, "commit_failed", "the commit failed half-way")));
        sandbox.gone().await;
        image
    }

    /// No more creates; all sandboxes end unless they are kept. What the node itself has on the machine goes as well.
    pub async fn close(&self, keep_sandboxes: bool) {
        let all: Vec<Arc<Sandbox>> = {
            let mut table = self.0.table();
            table.closed = true;
            table.sandboxes.values().cloned().collect()
        };
        let warm = {
            let _one = self.0.warming.lock().await;
            self.0.warm().close()
        };
        self.drop_warm(warm).await;
        if keep_sandboxes {
            return;
        }
        for sandbox in &all {
            let _ = sandbox.cancelled.set(Cause::Killed);
            self.end(sandbox, Cause::Killed);
        }
        for sandbox in &all {
            sandbox.gone().await;
        }
        let inner = Arc::clone(&self.0);
        let _ = tokio::task::spawn_blocking(move || {
            inner.cgroups.close();
            inner.disks.close(false);
            if let Err(error) = inner.network.close() {
                eprintln!("noded: the network's rules and links stay: {error}");
            }
        })
        .await;
    }
}

fn take_down(node: &Inner, sandbox: &Sandbox, cause: Cause, commit: Option<(CommitOptions, CommitReply)>) {
    let Some(body) = sandbox.body.get() else { return };
    let mut record = body.record.clone();
    let (commit, reply) = match (commit, &body.image) {
        (Some((options, reply)), Some(base)) => (Some(teardown::Commit { base, options }), Some(reply)),
        (Some((_, reply)), None) => {
            let error =
                ApiError::new(409, "image_not_found", "the image that the sandbox runs on is no longer in the store");
            let _ = reply.send(Err(error));
            (None, None)
        }
        (None, _) => (None, None),
    };
    let (end, committed) = teardown(node, &mut record, Some(&body.pidfd), cause, commit);
    node.events.ended(end);
    if let (Some(reply), Some(committed)) = (reply, committed) {
        let _ = reply.send(committed); // the caller went away: the image is there all the same
    }
}

fn cancelled() -> ApiError {
    ApiError::new(409, "create_cancelled", "the sandbox was deleted before it had started")
}

/// The name of this node's groups: the same for every start on this directory, another for every other.
fn node_id(dir: &Path) -> String {
    use sha2::{Digest, Sha256};
    let hash = Sha256::digest(dir.as_os_str().as_encoded_bytes());
    hash[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Directory for Node {
    fn route(&self, id: &str) -> Option<Route> {
        let sandbox = self.find_running(id).ok()?;
        Some(Route { socket: self.sandbox_dir(id).join("sandboxd.sock"), token: sandbox.spec.token.clone() })
    }

    fn ended(&self, id: &str) -> Option<serde_json::Value> {
        serde_json::to_value(self.0.ended.get(id)?).ok()
    }

    fn touch(&self, id: &str) {
        if let Ok(sandbox) = self.find(id) {
            sandbox.lease.used(0.0);
        }
    }
}
