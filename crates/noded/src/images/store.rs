//! The index of images, and every operation on whole images.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use sandmill_wire::ApiError;

use super::{
    commit,
    gc::{self, Collected, Marks, Origin, Removed},
    host,
    layers::{Durability, Layers, Scratch},
    manifest::{LayerRef, Manifest, TreeRecord},
    names,
    registry::{self, Credentials, Pulling, Pulls, Reference, Refusal},
    source, tree, CommitOptions, Error, Format, ImageInfo, ResolvedImage, Result, Tree,
};

/// What names of prepared environments begin with.
const ENVIRONMENT_PREFIX: &str = "env:";
/// How long a use of an image may stay unwritten.
const USED_FLUSH_INTERVAL: Duration = Duration::from_secs(60);

/// The image store of one state directory. Cloning is cheap; all clones are the same store. Its calls block on disk
/// work: an async caller runs all but [`Store::resolve`] on a blocking thread.
#[derive(Clone)]
pub struct Store(Arc<Inner>);

/// What the operator decides about images.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// A `registries.conf`; None: the machine's usual one.
    pub registries: Option<PathBuf>,
    pub marks: Marks,
}

struct Inner {
    options: Options,
    pulls: Arc<Pulls>,
    /// Made with the first pull.
    client: Mutex<Option<Arc<registry::Client>>>,
    dir: PathBuf,
    layers: Layers,
    /// Guards the manifests and names on disk as well.
    index: Mutex<Index>,
    host: OnceLock<String>,
    /// Taken while the skeleton of the host image is made.
    host_flight: Mutex<()>,
}

#[derive(Debug)]
struct Index {
    manifests: HashMap<String, Manifest>,
    names: BTreeMap<String, String>,
    live: HashMap<String, Weak<ResolvedImage>>,
    used_at: BTreeMap<String, f64>,
    used_flushed: Instant,
}

impl Store {
    /// Opens the store under `dir` (`DIR/images`), making what is missing, and empties `staging`. The caller holds the
    /// state directory's lock. The host image is prepared in the background.
    pub fn open(dir: &Path, options: Options) -> Result<Self> {
        let dir = &std::path::absolute(dir).map_err(Error::io("find", dir))?;
        for path in [dir.to_owned(), dir.join("layers"), dir.join("host"), dir.join("manifests"), dir.join("staging")] {
            match fs::DirBuilder::new().mode(0o700).create(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(Error::io("make", path)(error));
                }
                _ => {}
            }
        }
        let staging = dir.join("staging");
        crate::state_dir::spread(&staging);
        for entry in fs::read_dir(&staging).map_err(Error::io("list", &staging))? {
            tree::remove(&entry.map_err(Error::io("list", &staging))?.path())?;
        }
        let manifests = Manifest::load_all(&dir.join("manifests"))?;
        let mut names = names::load(&dir.join("refs.json"))?;
        names.retain(|_, id| manifests.contains_key(id));
        let used_at = names::load(&dir.join("used.json")).unwrap_or_default();
        let index = Index { manifests, names, live: HashMap::new(), used_at, used_flushed: Instant::now() };
        let store = Self(Arc::new(Inner {
            options,
            pulls: Arc::default(),
            client: Mutex::default(),
            dir: dir.to_owned(),
            layers: Layers::new(dir.join("layers"), staging),
            index: Mutex::new(index),
            host: OnceLock::new(),
            host_flight: Mutex::default(),
        }));
        let ahead = store.clone();
        std::thread::Builder::new()
            .name("host-image".to_owned())
            // An error here comes again, to whoever asks for the image.
            .spawn(move || drop(ahead.host_id()))
            .map_err(Error::io("start a thread for", dir))?;
        Ok(store)
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        // Each change of the index is complete before anything that can panic.
        self.0.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The image called `name_or_id`. Fast (no disk work) once the host image is prepared.
    pub fn resolve(&self, name_or_id: &str) -> std::result::Result<Arc<ResolvedImage>, ApiError> {
        Ok(self.resolved(name_or_id)?)
    }

    fn resolved(&self, name_or_id: &str) -> Result<Arc<ResolvedImage>> {
        let id = if name_or_id == host::NAME { self.host_id()? } else { self.id_of(name_or_id)? };
        let mut index = self.index();
        index.used_at.insert(id.clone(), now());
        if index.used_flushed.elapsed() > USED_FLUSH_INTERVAL {
            index.used_flushed = Instant::now();
            self.flush_used(&index);
        }
        if let Some(image) = index.live.get(&id).and_then(Weak::upgrade) {
            return Ok(image);
        }
        let (trees, config) = match index.manifests.get(&id) {
            Some(manifest) => {
                (manifest.trees.iter().map(|record| self.tree(record)).collect(), manifest.config.clone())
            }
            None => match host::hex_of(&id).map(|hex| self.skeleton(hex)).filter(|fs| fs.is_dir()) {
                Some(fs) => (host::trees(fs), host::config()),
                None => return Err(Error::NotFound { name: name_or_id.to_owned() }),
            },
        };
        let image = Arc::new(ResolvedImage { id: id.clone(), trees, config });
        index.live.insert(id, Arc::downgrade(&image));
        Ok(image)
    }

    fn id_of(&self, name_or_id: &str) -> Result<String> {
        let index = self.index();
        let pulled = || {
            let reference = Reference::parse(name_or_id).ok()?;
            index.names.get(&reference.to_string()).cloned()
        };
        names::find(&index.names, name_or_id, index.manifests.keys())
            .or_else(pulled)
            .or_else(|| host::hex_of(name_or_id).map(|_| name_or_id.to_owned()))
            .ok_or_else(|| Error::NotFound { name: name_or_id.to_owned() })
    }

    fn host_id(&self) -> Result<String> {
        if let Some(id) = self.0.host.get() {
            return Ok(id.clone());
        }
        let _turn = self.0.host_flight.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(id) = self.0.host.get() {
            return Ok(id.clone());
        }
        let id = host::prepare(Path::new("/"), &self.0.dir.join("host"), &self.0.dir.join("staging"))?;
        Ok(self.0.host.get_or_init(|| id).clone())
    }

    fn skeleton(&self, hex: &str) -> PathBuf {
        self.0.dir.join("host").join(hex).join("fs")
    }

    fn tree(&self, record: &TreeRecord) -> Tree {
        let lower = record.layers.iter().rev().map(|layer| match layer {
            LayerRef::Stored(digest) => self.0.layers.tree(digest),
            LayerRef::Skeleton(hex) => self.skeleton(hex),
            LayerRef::HostUsr => PathBuf::from("/usr"),
        });
        Tree { target: record.target.clone(), lower: lower.collect() }
    }

    /// Takes in the image at `path`. `name` may be absent if the file itself names the image.
    pub fn import(&self, path: &Path, name: Option<&str>, format: Format) -> std::result::Result<ImageInfo, ApiError> {
        if let Some(name) = name {
            names::check(name)?;
        }
        let imported = source::import(path, format, &self.0.layers)?;
        let suggested = imported.suggested_name.clone();
        let name = name.map(str::to_owned).or(suggested).ok_or_else(|| Error::InvalidArgument {
            reason: format!("{} does not say what the image is called: give a name", path.display()),
        })?;
        names::check(&name)?;
        Ok(self.keep(imported, Origin::Imported, &name)?)
    }

    fn keep(&self, imported: source::Imported, origin: Origin, name: &str) -> Result<ImageInfo> {
        let layers = imported.layers.iter().map(|(meta, _)| LayerRef::Stored(meta.digest.clone())).collect();
        let trees = vec![TreeRecord { target: PathBuf::from("/"), layers }];
        let warnings = imported.layers.iter().flat_map(|(meta, _)| meta.warnings.iter().cloned()).collect();
        let size_bytes = imported.layers.iter().map(|(meta, _)| meta.size_bytes).sum();
        let manifest = Manifest::new(origin, trees, imported.config, size_bytes, warnings);
        // `imported.layers` holds the pins until the manifest is in place.
        self.record(manifest, Some(name))
    }

    /// Fetches the image called `name` from its registry, once for all who ask at the same time; answers at once if it is
    /// there and needs not be `newest`. Ends when all who asked have gone away.
    pub async fn pull(
        &self,
        name: &str,
        credentials: Option<Credentials>,
        newest: bool,
    ) -> std::result::Result<ImageInfo, ApiError> {
        let reference = Reference::parse(name)?;
        names::check(&reference.to_string())?;
        if !newest {
            if let Some(info) = self.named(&reference.to_string()) {
                return Ok(info);
            }
        }
        let store = self.clone();
        self.0.pulls.join(reference, credentials, move |work| store.fetch(work)).await
    }

    fn named(&self, name: &str) -> Option<ImageInfo> {
        let index = self.index();
        self.info(&index, index.names.get(name)?)
    }

    fn fetch(&self, work: registry::Work) -> std::result::Result<ImageInfo, ApiError> {
        let name = work.reference.to_string();
        let registries = self.0.options.registries.as_deref();
        let source = registry::Source::open(self.client()?, work, registries)?;
        let info = source::oci::import(&source, None, &self.0.layers)
            .and_then(|found| self.keep(found, Origin::Pulled, &name));
        let info = info.map_err(|error| source.refusal().map_or(error, Error::Registry))?;
        if let Err(error) = self.collect(&gc::Request::default()) {
            eprintln!("noded: images: {error}"); // the image is there, all the same
        }
        Ok(info)
    }

    fn client(&self) -> std::result::Result<Arc<registry::Client>, Refusal> {
        let mut client = self.0.client.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = &*client {
            return Ok(Arc::clone(client));
        }
        Ok(Arc::clone(client.insert(Arc::new(registry::Client::new()?))))
    }

    /// The pulls that go on now.
    pub fn pulling(&self) -> Vec<Pulling> {
        self.0.pulls.list()
    }

    /// Removes unused images, those first that were used longest ago, until as much of the disk is free as asked for.
    pub fn collect(&self, request: &gc::Request) -> std::result::Result<Collected, ApiError> {
        request.check()?;
        let (mut used_percent, mut free_bytes) = gc::usage(&self.0.dir)?;
        let mut removed = Vec::new();
        if let Some(target) = request.target(self.0.options.marks, used_percent) {
            for candidate in self.candidates(request) {
                if used_percent <= target {
                    break;
                }
                // One that has come into use since stays.
                if !request.dry_run && self.remove(&candidate.id).is_err() {
                    continue;
                }
                removed.push(candidate);
                (used_percent, free_bytes) = gc::usage(&self.0.dir)?;
            }
        }
        Ok(Collected { removed, used_percent, free_bytes })
    }

    /// Unused images that may go, in the order in which they should.
    fn candidates(&self, request: &gc::Request) -> Vec<Removed> {
        let index = self.index();
        let before = now() - request.unused_for_s;
        let mut candidates: Vec<Removed> = index
            .manifests
            .values()
            .filter(|manifest| request.imported || manifest.origin != Origin::Imported)
            .filter_map(|manifest| self.info(&index, &manifest.id))
            .filter(|info| info.in_use == 0 && info.last_used_at <= before)
            .map(|info| Removed {
                id: info.id,
                names: info.names,
                size_bytes: info.size_bytes,
                last_used_at: info.last_used_at,
            })
            .collect();
        candidates.sort_by(|a, b| a.last_used_at.total_cmp(&b.last_used_at));
        candidates
    }

    /// Makes the changes of an ended sandbox that ran on `base` into one layer per tree, and an image of them.
    ///
    /// `uppers` are (target of the tree, its upper directory), owned by `uid_base + n`; the directories are moved away
    /// where the file system allows it, copied otherwise. Nothing may have them mounted any more.
    pub fn commit(
        &self,
        base: &ResolvedImage,
        uppers: &[(PathBuf, PathBuf)],
        uid_base: u32,
        options: CommitOptions,
    ) -> std::result::Result<ImageInfo, ApiError> {
        if let Some(name) = &options.name {
            names::check(name)?;
        }
        let (mut trees, mut size_bytes, mut warnings) = self.records_of(base)?;
        let durability = if options.name.is_some() { Durability::Synced } else { Durability::Cached };
        let mut pins = Vec::new();
        for (target, upper) in uppers {
            let record =
                trees.iter_mut().find(|record| record.target == *target).ok_or_else(|| Error::Uncommittable {
                    path: upper.clone(),
                    reason: format!("image {} has no tree at {}", base.id, target.display()),
                })?;
            let Some((meta, pin)) = commit::layer(&self.0.layers, target, upper, uid_base, durability)? else {
                continue;
            };
            record.layers.push(LayerRef::Stored(meta.digest));
            size_bytes += meta.size_bytes;
            warnings.extend(meta.warnings);
            pins.push(pin);
        }
        let config = commit::configure(base.config.clone(), options.config);
        // A commit that a person named is theirs; `env:` is prepared environments' (docs/reference/protocols.md).
        let derived = options.name.as_ref().is_none_or(|name| name.starts_with(ENVIRONMENT_PREFIX));
        let origin = if derived { Origin::Derived } else { Origin::Imported };
        let manifest = Manifest::new(origin, trees, config, size_bytes, warnings);
        let info = self.record(manifest, options.name.as_deref())?;
        drop(pins);
        Ok(info)
    }

    fn records_of(&self, base: &ResolvedImage) -> Result<(Vec<TreeRecord>, u64, Vec<String>)> {
        if let Some(hex) = host::hex_of(&base.id) {
            return Ok((
                vec![
                    TreeRecord { target: PathBuf::from("/"), layers: vec![LayerRef::Skeleton(hex.to_owned())] },
                    TreeRecord { target: PathBuf::from("/usr"), layers: vec![LayerRef::HostUsr] },
                ],
                0,
                Vec::new(),
            ));
        }
        let index = self.index();
        let manifest = index.manifests.get(&base.id).ok_or_else(|| Error::NotFound { name: base.id.clone() })?;
        Ok((manifest.trees.clone(), manifest.size_bytes, manifest.warnings.clone()))
    }

    /// Writes the manifest, then the name that points to it.
    fn record(&self, manifest: Manifest, name: Option<&str>) -> Result<ImageInfo> {
        let mut index = self.index();
        manifest.save(&self.0.dir.join("manifests"), &self.0.dir.join("staging"))?;
        let id = manifest.id.clone();
        index.used_at.entry(id.clone()).or_insert_with(now);
        index.manifests.insert(id.clone(), manifest);
        if let Some(name) = name {
            index.names.insert(name.to_owned(), id.clone());
            self.save_names(&index)?;
        }
        self.info(&index, &id).ok_or(Error::NotFound { name: id })
    }

    fn save_names(&self, index: &Index) -> Result<()> {
        names::save(&self.0.dir.join("refs.json"), &self.0.dir.join("staging"), &index.names, Durability::Synced)
    }

    fn flush_used(&self, index: &Index) {
        // Only tells which images lie idle; not worth failing a create for.
        let _ =
            names::save(&self.0.dir.join("used.json"), &self.0.dir.join("staging"), &index.used_at, Durability::Cached);
    }

    /// All images; the host image first, where this machine can give it.
    pub fn list(&self) -> Vec<ImageInfo> {
        let host = self.host_id().ok();
        let index = self.index();
        let mut images: Vec<ImageInfo> = index.manifests.keys().filter_map(|id| self.info(&index, id)).collect();
        images.sort_by(|a, b| (&a.names, &a.id).cmp(&(&b.names, &b.id)));
        host.iter().filter_map(|id| self.info(&index, id)).chain(images).collect()
    }

    pub fn inspect(&self, name_or_id: &str) -> std::result::Result<ImageInfo, ApiError> {
        let id = if name_or_id == host::NAME { self.host_id()? } else { self.id_of(name_or_id)? };
        let index = self.index();
        Ok(self.info(&index, &id).ok_or_else(|| Error::NotFound { name: name_or_id.to_owned() })?)
    }

    fn info(&self, index: &Index, id: &str) -> Option<ImageInfo> {
        let in_use = index.live.get(id).map_or(0, Weak::strong_count);
        let last_used_at = index.used_at.get(id).copied();
        let Some(manifest) = index.manifests.get(id) else {
            let fs = self.skeleton(host::hex_of(id)?);
            let created_at = fs::metadata(fs).and_then(|metadata| metadata.modified()).map_or(0.0, unix_s);
            let names =
                if self.0.host.get().is_some_and(|host| host == id) { vec![host::NAME.to_owned()] } else { vec![] };
            return Some(ImageInfo {
                id: id.to_owned(),
                names,
                layers: vec![id.to_owned()],
                config: host::config(),
                size_bytes: 0,
                created_at,
                last_used_at: last_used_at.unwrap_or(created_at),
                in_use,
                warnings: Vec::new(),
            });
        };
        Some(ImageInfo {
            id: id.to_owned(),
            names: index.names.iter().filter(|(_, of)| *of == id).map(|(name, _)| name.clone()).collect(),
            layers: manifest.layers().map(ToString::to_string).collect(),
            config: manifest.config.clone(),
            size_bytes: manifest.size_bytes,
            created_at: manifest.created_at,
            last_used_at: last_used_at.unwrap_or(manifest.created_at),
            in_use,
            warnings: manifest.warnings.clone(),
        })
    }

    /// Takes a name away, and the image with its last name (or when asked by id). Layers that no other image uses go
    /// with it.
    pub fn remove(&self, name_or_id: &str) -> std::result::Result<(), ApiError> {
        if name_or_id == host::NAME || host::hex_of(name_or_id).is_some() {
            let reason = "the image \"host\" is this machine itself and cannot be removed".to_owned();
            return Err(Error::InvalidArgument { reason }.into());
        }
        let id = self.id_of(name_or_id)?;
        let mut index = self.index();
        let is_name = index.names.contains_key(name_or_id);
        let names = index.names.values().filter(|of| **of == id).count();
        if is_name && names > 1 {
            index.names.remove(name_or_id);
            self.save_names(&index)?;
            return Ok(());
        }
        let holders = index.live.get(&id).map_or(0, Weak::strong_count);
        if holders > 0 {
            return Err(Error::InUse { name: name_or_id.to_owned(), holders }.into());
        }
        index.names.retain(|_, of| *of != id);
        self.save_names(&index)?;
        self.forget(&mut index, &id)?;
        let discarded = self.discard(&index)?;
        drop(index);
        drop(discarded);
        Ok(())
    }

    /// Removes every image without a name that nobody uses, every layer of no image, and old host skeletons. Called
    /// after a start, when the sandboxes that still live have resolved their images again.
    pub fn sweep(&self) -> std::result::Result<(), ApiError> {
        // Which skeletons are old is known when the present one is. A machine without a host image has none.
        let _ = self.host_id();
        let mut index = self.index();
        let named: HashSet<String> = index.names.values().cloned().collect();
        let unused: Vec<String> = index
            .manifests
            .keys()
            .filter(|id| !named.contains(*id) && index.live.get(*id).map_or(0, Weak::strong_count) == 0)
            .cloned()
            .collect();
        for id in unused {
            self.forget(&mut index, &id)?;
        }
        let discarded = self.discard(&index)?;
        drop(index);
        drop(discarded);
        Ok(())
    }

    fn forget(&self, index: &mut Index, id: &str) -> Result<()> {
        Manifest::delete(&self.0.dir.join("manifests"), id)?;
        index.manifests.remove(id);
        index.live.remove(id);
        index.used_at.remove(id);
        Ok(())
    }

    /// What no image needs, moved to `staging`: deleted when the result is dropped.
    fn discard(&self, index: &Index) -> Result<Vec<Scratch>> {
        let wanted: HashSet<&str> =
            index.manifests.values().flat_map(Manifest::layers).filter_map(LayerRef::digest).collect();
        let mut discarded = self.0.layers.discard_except(&wanted)?;
        let Some(current) = self.0.host.get() else { return Ok(discarded) };
        let dir = self.0.dir.join("host");
        for entry in fs::read_dir(&dir).map_err(Error::io("list", &dir))? {
            let entry = entry.map_err(Error::io("list", &dir))?;
            let hex = entry.file_name().to_string_lossy().into_owned();
            let id = format!("{}{hex}", host::ID_PREFIX);
            let referenced = index
                .manifests
                .values()
                .flat_map(Manifest::layers)
                .any(|layer| *layer == LayerRef::Skeleton(hex.clone()));
            if id == *current || referenced || index.live.get(&id).map_or(0, Weak::strong_count) > 0 {
                continue;
            }
            let scratch = self.0.layers.scratch()?;
            let to = scratch.path().join("discarded");
            fs::rename(entry.path(), &to).map_err(Error::io("move away", entry.path()))?;
            discarded.push(scratch);
        }
        Ok(discarded)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let index = self.index.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = names::save(&self.dir.join("used.json"), &self.dir.join("staging"), &index.used_at, Durability::Cached);
    }
}

pub fn now() -> f64 {
    unix_s(SystemTime::now())
}

fn unix_s(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
