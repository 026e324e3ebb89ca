//! One pull for all who ask for the same image, its progress, and its end when nobody waits any more.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sandmill_wire::ApiError;
use serde::Serialize;
use tokio::sync::watch;

use super::{
    progress::{Layer, Progress},
    Credentials, Reference,
};
use crate::images::ImageInfo;

type Outcome = std::result::Result<ImageInfo, ApiError>;
type Key = (String, Option<Credentials>);

/// The pulls that go on now.
#[derive(Default)]
pub struct Pulls(Mutex<HashMap<Key, Arc<Pull>>>);

struct Pull {
    progress: Arc<Progress>,
    outcome: watch::Sender<Option<Outcome>>,
    cancelled: watch::Sender<bool>,
}

/// A pull as a listing shows it.
#[derive(Debug, Serialize)]
pub struct Pulling {
    pub name: String,
    pub layers: Vec<Layer>,
}

/// What the one who does the work needs.
pub struct Work {
    pub reference: Reference,
    pub credentials: Option<Credentials>,
    pub progress: Arc<Progress>,
    pub cancelled: watch::Receiver<bool>,
}

/// Held by each who waits: the last one to go away ends the pull.
struct Waiter<'a> {
    pulls: &'a Pulls,
    key: &'a Key,
    pull: Arc<Pull>,
    outcome: Option<watch::Receiver<Option<Outcome>>>,
}

impl Pulls {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Arc<Pull>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn list(&self) -> Vec<Pulling> {
        let mut all: Vec<Pulling> = self
            .lock()
            .iter()
            .map(|((name, _), pull)| Pulling { name: name.clone(), layers: pull.progress.layers() })
            .collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Waits for the image, which `work` (blocking) fetches once for all who wait at the same time with the same credentials.
    pub async fn join(
        self: &Arc<Self>,
        reference: Reference,
        credentials: Option<Credentials>,
        work: impl FnOnce(Work) -> Outcome + Send + 'static,
    ) -> Outcome {
        let key = (reference.to_string(), credentials.clone());
        let (pull, outcome, is_first) = {
            let mut pulls = self.lock();
            let is_first = !pulls.contains_key(&key);
            let pull = pulls.entry(key.clone()).or_insert_with(|| {
                Arc::new(Pull {
                    progress: Arc::default(),
                    outcome: watch::Sender::new(None),
                    cancelled: watch::Sender::new(false),
                })
            });
            (Arc::clone(pull), pull.outcome.subscribe(), is_first)
        };
        if is_first {
            let (of, pulls, key) = (Arc::clone(&pull), Arc::clone(self), key.clone());
            let given = Work {
                reference,
                credentials,
                progress: Arc::clone(&pull.progress),
                cancelled: pull.cancelled.subscribe(),
            };
            tokio::spawn(async move {
                let done = tokio::task::spawn_blocking(move || work(given)).await;
                let done = done
                    .unwrap_or_else(|_| Err(ApiError::new(500, "internal", "the pull failed; noded's log says where")));
                pulls.forget(&key, &of);
                of.outcome.send_replace(Some(done));
            });
        }
        let mut waiter = Waiter { pulls: self, key: &key, pull, outcome: Some(outcome) };
        let outcome = waiter.outcome.as_mut().expect("set above");
        let done = outcome.wait_for(Option::is_some).await.map(|done| done.clone());
        match done {
            Ok(Some(done)) => done,
            _ => Err(ApiError::new(500, "internal", "the pull ended without a word")),
        }
    }

    /// Takes a pull off the list, unless another one stands in its place.
    fn forget(&self, key: &Key, pull: &Arc<Pull>) {
        let mut pulls = self.lock();
        if pulls.get(key).is_some_and(|there| Arc::ptr_eq(there, pull)) {
            pulls.remove(key);
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        // Under the lock that a newcomer takes to join: nobody joins a pull that is being cancelled.
        let mut pulls = self.pulls.lock();
        drop(self.outcome.take());
        if self.pull.outcome.receiver_count() == 0 {
            self.pull.cancelled.send_replace(true);
            if pulls.get(self.key).is_some_and(|there| Arc::ptr_eq(there, &self.pull)) {
                pulls.remove(self.key);
            }
        }
    }
}
