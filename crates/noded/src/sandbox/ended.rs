//! Sandboxes that are gone: why, for an hour.

use std::{
    collections::{HashMap, VecDeque},
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use super::info::SandboxEnd;

const KEPT_S: f64 = 3600.0;
const KEPT: usize = 20_000;

/// `DIR/ended.jsonl`: a line an end, appended; rewritten when half of it is old.
pub struct Ended {
    path: PathBuf,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    by_id: HashMap<String, SandboxEnd>,
    /// Oldest first.
    order: VecDeque<(f64, String)>,
    lines: usize,
}

impl Ended {
    /// Reads what an earlier noded wrote; a torn last line is skipped.
    pub fn open(dir: &Path) -> Self {
        let path = dir.join("ended.jsonl");
        let mut kept = Kept::default();
        for line in fs::read_to_string(&path).unwrap_or_default().lines() {
            if let Ok(end) = serde_json::from_str::<SandboxEnd>(line) {
                kept.insert(end);
            }
            kept.lines += 1;
        }
        Self { path, kept: Mutex::new(kept) }
    }

    /// Remembers an end. An error means that a restarted noded will not know of it.
    pub fn add(&self, end: SandboxEnd) -> io::Result<()> {
        let mut line = serde_json::to_vec(&end)?;
        line.push(b'\n');
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.insert(end);
        kept.forget(super::unix_now());
        kept.lines += 1;
        if kept.lines > 2 * kept.by_id.len() + 1000 {
            return self.rewrite(&mut kept);
        }
        File::options().create(true).append(true).open(&self.path)?.write_all(&line)
    }

    fn rewrite(&self, kept: &mut Kept) -> io::Result<()> {
        let draft = self.path.with_extension("jsonl.new");
        let mut text = Vec::new();
        for end in kept.order.iter().filter_map(|(_, id)| kept.by_id.get(id)) {
            serde_json::to_writer(&mut text, end)?;
            text.push(b'\n');
        }
        fs::write(&draft, text)?;
        fs::rename(&draft, &self.path)?;
        kept.lines = kept.by_id.len();
        Ok(())
    }

    pub fn get(&self, id: &str) -> Option<SandboxEnd> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).by_id.get(id).cloned()
    }

    pub fn all(&self) -> Vec<SandboxEnd> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.forget(super::unix_now());
        kept.order.iter().filter_map(|(_, id)| kept.by_id.get(id).cloned()).collect()
    }
}

impl Kept {
    fn insert(&mut self, end: SandboxEnd) {
        self.order.push_back((end.ended_at, end.id.clone()));
        self.by_id.insert(end.id.clone(), end);
    }

    fn forget(&mut self, now: f64) {
        while let Some((ended_at, _)) = self.order.front() {
            if *ended_at > now - KEPT_S && self.order.len() <= KEPT {
                break;
            }
            if let Some((_, id)) = self.order.pop_front() {
                self.by_id.remove(&id);
            }
        }
    }
}
