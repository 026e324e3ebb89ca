//! How far a pull is.

use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;

/// One layer of an image that is being pulled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Layer {
    pub digest: String,
    /// Compressed, as the manifest says.
    pub size_bytes: u64,
    pub read_bytes: u64,
    /// In the store.
    pub done: bool,
}

/// Of one pull, from its start on; empty until the manifest is there.
#[derive(Debug, Default)]
pub struct Progress(Mutex<Vec<Layer>>);

impl Progress {
    fn lock(&self) -> MutexGuard<'_, Vec<Layer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn expect(&self, layers: &[(&str, u64)]) {
        let layer = |(digest, size_bytes): &(&str, u64)| Layer {
            digest: (*digest).to_owned(),
            size_bytes: *size_bytes,
            read_bytes: 0,
            done: false,
        };
        *self.lock() = layers.iter().map(layer).collect();
    }

    pub fn read(&self, digest: &str, count_bytes: u64) {
        for layer in self.lock().iter_mut().filter(|layer| layer.digest == digest) {
            layer.read_bytes += count_bytes;
        }
    }

    pub fn done(&self, digest: &str) {
        for layer in self.lock().iter_mut().filter(|layer| layer.digest == digest) {
            layer.done = true;
        }
    }

    pub fn layers(&self) -> Vec<Layer> {
        self.lock().clone()
    }
}
