//! What holds a sandbox that nobody looks after any more: its lease is noded's to watch, and here is watched that there is a noded.
//!
//! noded hands over the reading end of a pipe whose writing end it alone holds, with the terms of the lease. When it is gone and
//! no next one has tied the sandbox again within the lease's length, the sandbox ends itself.

use std::{io, os::fd::OwnedFd, rc::Rc, time::Duration};

use sandmill_wire::LeaseTerms;
use tokio::{net::unix::pipe::Receiver, sync::watch, time::sleep};

use crate::activity::Activity;

/// Longest lease that is taken, a hundred years: nothing that is awaited may overflow the clock.
const LONGEST_S: f64 = 100.0 * 366.0 * 86400.0;

#[derive(Default)]
pub struct Tether {
    latest: watch::Sender<Option<Rc<Hold>>>,
}

struct Hold {
    noded: Receiver,
    lease: Duration,
    renewed_by_use: bool,
}

impl Tether {
    /// Ties the sandbox to whoever holds the other end of the pipe, instead of to an earlier one.
    pub fn tie(&self, noded: OwnedFd, terms: LeaseTerms) -> io::Result<()> {
        let ttl_s = if terms.ttl_s.is_finite() { terms.ttl_s.clamp(0.0, LONGEST_S) } else { LONGEST_S };
        let hold = Hold {
            noded: Receiver::from_owned_fd(noded)?,
            lease: Duration::from_secs_f64(ttl_s),
            renewed_by_use: terms.renew_on_use,
        };
        self.latest.send_replace(Some(Rc::new(hold)));
        Ok(())
    }

    /// Returns when the sandbox has outlived its lease with nobody to end it. Never, if nobody ever tied it.
    pub async fn torn(&self, activity: &Activity) {
        let mut latest = self.latest.subscribe();
        loop {
            let hold = latest.borrow_and_update().clone();
            let outlived = async {
                match &hold {
                    Some(hold) => gone(hold, activity).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = outlived => return,
                _ = latest.changed() => {}
            }
        }
    }
}

async fn gone(hold: &Hold, activity: &Activity) {
    if hold.noded.readable().await.is_err() {
        std::future::pending::<()>().await; // the runtime ends
    }
    let mut left = hold.lease;
    loop {
        sleep(left).await;
        let report = activity.report();
        let idle = if report.running > 0 { Duration::ZERO } else { Duration::from_secs_f64(report.idle_s) };
        if !hold.renewed_by_use || idle >= hold.lease {
            return;
        }
        left = hold.lease.saturating_sub(idle).max(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipe() -> (OwnedFd, OwnedFd) {
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap()
    }

    fn terms(ttl_s: f64, renew_on_use: bool) -> LeaseTerms {
        LeaseTerms { ttl_s, renew_on_use }
    }

    async fn ends(tether: &Tether, activity: &Activity, within_s: f64) -> bool {
        tokio::time::timeout(Duration::from_secs_f64(within_s), tether.torn(activity)).await.is_ok()
    }

    #[tokio::test]
    async fn it_ends_a_lease_after_noded() {
        let (tether, activity) = (Tether::default(), Activity::new());
        assert!(!ends(&tether, &activity, 0.05).await, "never tied");
        let (noded, alive) = pipe();
        tether.tie(noded, terms(0.05, false)).unwrap();
        assert!(!ends(&tether, &activity, 0.2).await, "noded lives");
        let (noded, second) = pipe();
        tether.tie(noded, terms(0.05, false)).unwrap();
        drop(alive);
        assert!(!ends(&tether, &activity, 0.2).await, "another has taken over");
        let (noded, third) = pipe();
        tether.tie(noded, terms(0.05, false)).unwrap();
        drop((second, third));
        assert!(ends(&tether, &activity, 5.0).await);
    }

    #[tokio::test]
    async fn use_keeps_it_where_it_renews() {
        let (tether, activity) = (Tether::default(), Activity::new());
        let call = activity.begin();
        let (noded, alive) = pipe();
        drop(alive);
        tether.tie(noded, terms(0.05, true)).unwrap();
        assert!(!ends(&tether, &activity, 0.2).await, "a call runs");
        drop(call);
        let (noded, alive) = pipe();
        drop(alive);
        tether.tie(noded, terms(0.05, true)).unwrap();
        assert!(ends(&tether, &activity, 5.0).await);
    }
}
