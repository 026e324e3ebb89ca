//! Leases: one sweep over what exists, once a second. Counted in time since boot, so that no clock jump ends a sandbox.

use std::{
    collections::BTreeMap,
    fs, io,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{
    info::Cause,
    node::{Node, Sandbox},
    talk::{self, Activity},
};
use crate::isolation::process::boottime_s;

const PERIOD: Duration = Duration::from_secs(1);
/// How long a sandboxd may take to say whether it is in use, before its lease ends.
const ANSWER: Duration = Duration::from_millis(300);

/// The terms of a lease, which the next noded finds in `DIR/leases.json`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    /// Seconds since boot.
    pub expires_s: f64,
    /// As last renewed.
    pub ttl_s: f64,
    pub renew_on_use: bool,
}

impl Kept {
    pub fn has_ended(&self) -> bool {
        self.expires_s <= boottime_s()
    }
}

/// The lease of one sandbox.
#[derive(Debug)]
pub struct Lease(Mutex<Terms>);

#[derive(Debug, Clone, Copy)]
struct Terms {
    kept: Kept,
    /// Somebody asks sandboxd just now.
    asking: bool,
}

impl Lease {
    /// Begins now.
    pub fn new(ttl_s: f64, renew_on_use: bool) -> Self {
        Self::again(Kept { expires_s: boottime_s() + ttl_s, ttl_s, renew_on_use })
    }

    /// Goes on as an earlier noded has kept it.
    pub fn again(kept: Kept) -> Self {
        Self(Mutex::new(Terms { kept, asking: false }))
    }

    fn terms(&self) -> std::sync::MutexGuard<'_, Terms> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on for `ttl_s`. Whether its length or what renews it is another now.
    pub fn renew(&self, ttl_s: f64, renew_on_use: Option<bool>) -> bool {
        let kept = &mut self.terms().kept;
        let before = (kept.ttl_s, kept.renew_on_use);
        kept.ttl_s = ttl_s;
        kept.renew_on_use = renew_on_use.unwrap_or(kept.renew_on_use);
        kept.expires_s = boottime_s() + ttl_s;
        before != (kept.ttl_s, kept.renew_on_use)
    }

    /// It was used now, or `idle_s` ago.
    pub fn used(&self, idle_s: f64) {
        let kept = &mut self.terms().kept;
        if kept.renew_on_use {
            kept.expires_s = kept.expires_s.max(boottime_s() - idle_s + kept.ttl_s);
        }
    }

    pub fn kept(&self) -> Kept {
        self.terms().kept
    }

    pub fn expires_s(&self) -> f64 {
        self.terms().kept.expires_s
    }

    fn expired(&self) -> bool {
        let terms = self.terms();
        !terms.asking && terms.kept.has_ended()
    }

    fn asks_first(&self) -> bool {
        let mut terms = self.terms();
        terms.asking = terms.kept.renew_on_use;
        terms.asking
    }

    fn asked(&self) {
        self.terms().asking = false;
    }
}

/// Ends what has outlived its lease, for ever; keeps `DIR/leases.json` up to date for the next noded.
pub async fn sweep(node: Node) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut written = BTreeMap::new();
    loop {
        ticks.tick().await;
        node.cool_down().await;
        let all = node.running();
        for sandbox in all.iter().filter(|sandbox| sandbox.lease.expired()) {
            if sandbox.lease.asks_first() {
                tokio::spawn(ask_then_end(node.clone(), Arc::clone(sandbox)));
            } else {
                node.end(sandbox, Cause::LeaseExpired);
            }
        }
        let leases: BTreeMap<String, Kept> =
            all.iter().map(|sandbox| (sandbox.spec.id.clone(), sandbox.lease.kept())).collect();
        if leases != written {
            if let Err(error) = save(node.dir(), &leases) {
                eprintln!("noded: leases.json is not up to date: {error}");
            }
            written = leases;
        }
    }
}

/// A client may talk to sandboxd over a connection that the gateway has handed over, so only sandboxd knows.
async fn ask_then_end(node: Node, sandbox: Arc<Sandbox>) {
    let dir = node.sandbox_dir(&sandbox.spec.id);
    let activity: Option<Activity> = talk::ask(&dir, "/sandmill/v1/activity", ANSWER).await;
    if let Some(activity) = activity {
        sandbox.lease.used(if activity.running > 0 { 0.0 } else { activity.idle_s });
    }
    sandbox.lease.asked();
    if sandbox.lease.expired() {
        node.end(&sandbox, Cause::LeaseExpired);
    }
}

fn save(dir: &Path, leases: &BTreeMap<String, Kept>) -> io::Result<()> {
    let draft = dir.join("leases.json.new");
    fs::write(&draft, serde_json::to_vec(leases)?)?;
    fs::rename(&draft, dir.join("leases.json"))
}

/// The leases as an earlier noded of this boot wrote them, at most a second before its end.
pub fn load(dir: &Path) -> BTreeMap<String, Kept> {
    fs::read(dir.join("leases.json")).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn use_prolongs_only_where_asked() {
        let now = boottime_s();
        let fixed = Lease::new(5.0, false);
        fixed.used(0.0);
        assert!(fixed.expires_s() < now + 6.0);
        let renewed = Lease::again(Kept { expires_s: now - 1.0, ttl_s: 5.0, renew_on_use: true });
        assert!(renewed.expired());
        renewed.used(2.0);
        assert!(!renewed.expired() && renewed.expires_s() < now + 4.0);
        renewed.used(60.0);
        assert!(!renewed.expired(), "older use takes nothing away");
        renewed.renew(0.5, Some(false));
        assert!(renewed.expires_s() < now + 1.0);
        assert!(!renewed.asks_first());
    }
}
