//! Network of sandboxes with mode `all`.
//!
//! Each sandbox has a veth pair of its own and a /32 that is routed over it: there is no bridge, so sandboxes share no
//! segment. Packets leave by masquerading. The host's addresses, other sandboxes, metadata services and all of IPv6 are
//! dropped by rules (`rules`) that hold for every interface of the state directory, made once and never touched by a
//! create. Names are answered by a forwarder (`dns`) at the gateway's address.
//!
//! - `plan`: names and addresses.
//! - `netlink`: links, addresses, routes.
//! - `rules`: the packet filter.
//! - `forwarding`: the kernel's switch for passing packets on.
//! - `dns`: the forwarder.
//!
//! Nothing of the host is touched before the first sandbox asks. What noded leaves behind when it is killed carries the
//! state directory's hash in its name: [`Network::adopt`] finds it.

mod dns;
mod forwarding;
mod netlink;
mod plan;
mod rules;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    fs, io,
    net::Ipv4Addr,
    os::fd::{BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::thread::{move_into_link_name_space, LinkNameSpaceType};
use sandmill_wire::ApiError;
use serde::{Deserialize, Serialize};

use dns::Forwarder;
use netlink::{End, Netlink};
use plan::{Names, Range, PREFIX};

/// The sandbox's interface, seen from inside.
const INSIDE: &str = "eth0";
const DEFAULT_MTU: u32 = 1500;

/// The network of one sandbox, as its create has set it up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    pub ip: Ipv4Addr,
    /// Goes into the sandbox's /etc/resolv.conf.
    pub dns: Ipv4Addr,
}

/// The networks of one state directory. Its calls block for milliseconds, and are carried out one at a time (the kernel has
/// one lock for links); they work on the network namespace of the calling thread.
pub struct Network {
    names: Names,
    state_file: PathBuf,
    resolv_conf: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    shared: Option<Shared>,
    slots: HashMap<String, u32>,
}

/// What all sandboxes of the state directory share.
struct Shared {
    netlink: Netlink,
    range: Range,
    mtu: u32,
    /// Ends when dropped.
    #[allow(dead_code, reason = "held for its drop")]
    dns: Forwarder,
}

/// `DIR/network.json`: what must hold across a restart.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Saved {
    base: Option<Ipv4Addr>,
    /// Interfaces whose forwarding noded switched on.
    forwarding: Vec<String>,
}

impl Network {
    pub fn new(state_dir: &Path) -> Self {
        Self::with_resolv_conf(state_dir, Path::new("/etc/resolv.conf"))
    }

    fn with_resolv_conf(state_dir: &Path, resolv_conf: &Path) -> Self {
        Self {
            names: Names::of(state_dir),
            state_file: state_dir.join("network.json"),
            resolv_conf: resolv_conf.to_owned(),
            state: Mutex::default(),
        }
    }

    /// The addresses that `slot` will have, for files that are written before its network namespace exists. Sets up what all
    /// sandboxes share. Errors: 503 `network_unavailable`.
    pub fn reserve(&self, slot: u32) -> Result<Attached, ApiError> {
        let mut state = self.lock();
        let range = self.shared(&mut state)?.range;
        Ok(attached(range, slot)?)
    }

    /// Gives the network namespace `netns` an interface with the way out. Undone by [`Self::detach`], or by the end of the
    /// network namespace. An error leaves nothing behind. Errors: 503 `network_unavailable`.
    pub fn attach(&self, id: &str, slot: u32, netns: BorrowedFd) -> Result<Attached, ApiError> {
        let mut state = self.lock();
        let shared = self.shared(&mut state)?;
        let attached = attached(shared.range, slot)?;
        let name = self.names.host_end(slot);
        let made = shared.connect(&name, &attached, netns);
        if let Err(error) = made {
            // The first error is the one to tell.
            let _ = shared.netlink.remove_link(&name);
            return Err(error.into());
        }
        state.slots.insert(id.to_owned(), slot);
        Ok(attached)
    }

    /// Removes the sandbox's interface; nothing happens if it has none. Errors: 503 `network_unavailable`.
    pub fn detach(&self, id: &str) -> Result<(), ApiError> {
        let mut state = self.lock();
        let Some(slot) = state.slots.get(id).copied() else { return Ok(()) };
        if let Some(shared) = &mut state.shared {
            shared.netlink.remove_link(&self.names.host_end(slot)).map_err(Error::at("remove the veth pair"))?;
        }
        state.slots.remove(id);
        Ok(())
    }

    /// After a restart: takes over the networks of sandboxes that still live (only those with network `all`), and removes
    /// everything else that an earlier noded of this state directory left. Errors: 503 `network_unavailable`.
    pub fn adopt(&self, live: &[(String, u32)]) -> Result<(), ApiError> {
        let mut state = self.lock();
        let found = self.interfaces()?;
        if live.is_empty() {
            if !found.is_empty() || self.state_file.exists() {
                self.remove_all(&mut state)?;
            }
            return Ok(());
        }
        state.slots = live.iter().cloned().collect();
        self.shared(&mut state)?;
        let Some(shared) = &mut state.shared else { return Ok(()) };
        for (_, slot) in live {
            let attached = attached(shared.range, *slot)?;
            // A sandbox whose interface is gone has ended, or will have in a moment.
            if let Ok(index) = shared.netlink.index(&self.names.host_end(*slot)) {
                let route = shared.netlink.add_host_route(index, attached.ip, attached.dns);
                route.map_err(Error::at("set the route to a live sandbox"))?;
            }
        }
        for name in found {
            if self.names.slot(&name).is_some_and(|slot| !live.iter().any(|(_, lives)| *lives == slot)) {
                shared.netlink.remove_link(&name).map_err(Error::at("remove a stray veth pair"))?;
            }
        }
        Ok(())
    }

    /// Removes all that was made, the networks of sandboxes included. Errors: 503 `network_unavailable`.
    pub fn close(&self) -> Result<(), ApiError> {
        let mut state = self.lock();
        if state.shared.is_some() {
            self.remove_all(&mut state)?;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // What is inside is changed last in each call: a panic leaves it as it was.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shared<'a>(&self, state: &'a mut State) -> Result<&'a mut Shared, Error> {
        if state.shared.is_none() {
            state.shared = Some(self.set_up(&state.slots)?);
        }
        state.shared.as_mut().ok_or(Error::NoRange)
    }

    fn set_up(&self, slots: &HashMap<String, u32>) -> Result<Shared, Error> {
        let mut netlink = Netlink::open().map_err(Error::at("open a netlink socket"))?;
        let routes = plan::routes().map_err(Error::at("read the routing table"))?;
        let mut saved = self.load();
        // Our own routes, of an earlier run, are no obstacle.
        let prefix = self.names.prefix();
        let foreign = routes.iter().filter(|route| !route.interface.starts_with(&prefix));
        let mut taken: Vec<(u32, u32)> = foreign.map(|route| route.network).collect();
        taken.extend(dns::resolvers(&self.resolv_conf).iter().filter_map(|resolver| match resolver {
            std::net::IpAddr::V4(address) => Some((u32::from(*address), u32::MAX)),
            std::net::IpAddr::V6(_) => None,
        }));
        let before = saved.base.and_then(Range::new);
        // Live sandboxes keep the addresses that they have.
        let range = match before {
            Some(range) if !slots.is_empty() => range,
            _ => Range::choose(&self.names, &taken).ok_or(Error::NoRange)?,
        };
        let uplink = routes.iter().find(|route| route.network.1 == 0).map(|route| route.interface.clone());
        let mtu = uplink.and_then(|name| netlink.mtu(&name).ok()).unwrap_or(DEFAULT_MTU);
        saved.base = Some(range.base());
        // Saved before anything is made, so that a kill in between leaves nothing unknown.
        self.save(&saved)?;
        rules::apply(&self.names, range)?;
        self.add_gateway(&mut netlink, range, mtu, !slots.is_empty())?;
        let switched = forwarding::switch_on(&routes).map_err(Error::at("switch forwarding on"))?;
        if !switched.is_empty() {
            saved.forwarding.extend(switched);
            self.save(&saved)?;
        }
        let dns = Forwarder::start(range, &self.resolv_conf).map_err(Error::at("start the DNS forwarder"))?;
        Ok(Shared { netlink, range, mtu, dns })
    }

    /// `keep`: one that stands stays, since the routes to live sandboxes hang on its address.
    fn add_gateway(&self, netlink: &mut Netlink, range: Range, mtu: u32, keep: bool) -> Result<(), Error> {
        let (name, peer) = (self.names.gateway(), self.names.gateway_peer());
        let (mac, peer_mac) = plan::macs(range.gateway());
        if keep && netlink.index(&name).is_ok() {
            return Ok(());
        }
        netlink.remove_link(&name).map_err(Error::at("remove an old gateway"))?;
        netlink
            .add_veth(&End { name: &name, mac }, &End { name: &peer, mac: peer_mac }, mtu, None)
            .map_err(Error::at("make the gateway's interface"))?;
        forwarding::no_ipv6(&name);
        forwarding::no_ipv6(&peer);
        let index = netlink.index(&name).map_err(Error::at("find the gateway's interface"))?;
        netlink.set_up(index).map_err(Error::at("bring the gateway's interface up"))?;
        // The whole range is routed here: what has no sandbox ends here and not at the host's default route.
        netlink.add_address(index, range.gateway(), PREFIX).map_err(Error::at("set the gateway's address"))
    }

    fn interfaces(&self) -> Result<Vec<String>, Error> {
        let prefix = self.names.prefix();
        let all = plan::interfaces().map_err(Error::at("list interfaces"))?;
        Ok(all.into_iter().filter(|name| name.starts_with(&prefix)).collect())
    }

    fn remove_all(&self, state: &mut State) -> Result<(), Error> {
        state.shared = None;
        state.slots.clear();
        let mut netlink = Netlink::open().map_err(Error::at("open a netlink socket"))?;
        for name in self.interfaces()? {
            netlink.remove_link(&name).map_err(Error::at("remove an interface"))?;
        }
        match rules::remove(&self.names) {
            // Without nft there never were rules.
            Ok(()) | Err(Error::NftMissing) => {}
            Err(error) => return Err(error),
        }
        let others = plan::interfaces().map_err(Error::at("list interfaces"))?;
        if !others.iter().any(|name| plan::is_a_gateway(name)) {
            forwarding::switch_off(&self.load().forwarding);
        }
        match fs::remove_file(&self.state_file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::Step { step: "remove network.json", source: error })
            }
            _ => Ok(()),
        }
    }

    fn load(&self) -> Saved {
        // A file that cannot be read is as good as none: everything in it can be found anew.
        fs::read(&self.state_file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
    }

    fn save(&self, saved: &Saved) -> Result<(), Error> {
        let text = serde_json::to_vec(saved).map_err(|error| Error::Step { step: "save", source: error.into() })?;
        let new = self.state_file.with_extension("json.new");
        fs::write(&new, text).and_then(|()| fs::rename(&new, &self.state_file)).map_err(Error::at("write network.json"))
    }
}

impl Shared {
    fn connect(&mut self, name: &str, attached: &Attached, netns: BorrowedFd) -> Result<(), Error> {
        let (mac, inside_mac) = plan::macs(attached.ip);
        let (host, inside) = (End { name, mac }, End { name: INSIDE, mac: inside_mac });
        // The end of a sandbox that had the slot before may still wait for the kernel to clean up its namespace.
        self.netlink.remove_link(name).map_err(Error::at("remove an old veth pair"))?;
        self.netlink.add_veth(&host, &inside, self.mtu, Some(netns)).map_err(Error::at("make a veth pair"))?;
        forwarding::no_ipv6(name);
        forwarding::switch_on_one(name).map_err(Error::at("switch forwarding on"))?;
        let index = self.netlink.index(name).map_err(Error::at("find the veth pair"))?;
        self.netlink.set_up(index).map_err(Error::at("bring the veth pair up"))?;
        self.netlink
            .add_neighbour(index, attached.ip, inside_mac)
            .map_err(Error::at("pin the sandbox's link-layer address"))?;
        configure_inside(netns.try_clone_to_owned().map_err(Error::at("copy a descriptor"))?, attached, mac)?;
        self.netlink.add_host_route(index, attached.ip, attached.dns).map_err(Error::at("set the route to the sandbox"))
    }
}

/// On a thread of its own, which ends inside the sandbox's network namespace.
fn configure_inside(netns: OwnedFd, attached: &Attached, gateway_mac: netlink::Mac) -> Result<(), Error> {
    let attached = attached.clone();
    let work = move || {
        move_into_link_name_space(std::os::fd::AsFd::as_fd(&netns), Some(LinkNameSpaceType::Network))
            .map_err(|errno| Error::Step { step: "enter the network namespace", source: errno.into() })?;
        let mut netlink = Netlink::open().map_err(Error::at("open a netlink socket inside"))?;
        forwarding::no_ipv6(INSIDE);
        let index = netlink.index(INSIDE).map_err(Error::at("find the interface inside"))?;
        netlink.add_address(index, attached.ip, 32).map_err(Error::at("set the sandbox's address"))?;
        netlink.set_up(index).map_err(Error::at("bring the interface inside up"))?;
        netlink
            .add_neighbour(index, attached.dns, gateway_mac)
            .map_err(Error::at("pin the gateway's link-layer address"))?;
        netlink.add_host_route(index, attached.dns, attached.ip).map_err(Error::at("set the route to the gateway"))?;
        netlink.add_default_route(index, attached.dns).map_err(Error::at("set the default route"))
    };
    let thread = std::thread::Builder::new().name("network-inside".to_owned()).spawn(work);
    let ended = thread.map_err(Error::at("start a thread"))?.join();
    ended.unwrap_or_else(|_| Err(Error::at("configure the inside")(io::Error::other("the thread panicked"))))
}

fn attached(range: Range, slot: u32) -> Result<Attached, Error> {
    let ip = range.sandbox(slot).ok_or(Error::NoRange)?;
    Ok(Attached { ip, dns: range.gateway() })
}

/// Why a sandbox cannot have a network.
#[derive(Debug)]
pub enum Error {
    /// A step that the kernel refused.
    Step { step: &'static str, source: io::Error },
    /// The program `nft` is not installed.
    NftMissing,
    /// `nft` refused the rules: its message.
    Nft(String),
    /// 10.64.0.0/10 is in use as a whole, or the slot is out of range.
    NoRange,
}

impl Error {
    fn at(step: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Step { step, source }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Step { step, source } => write!(f, "the kernel refused a step ({step}): {source}"),
            Self::NftMissing => f.write_str("the program nft is not installed"),
            Self::Nft(message) => write!(f, "nft refused the rules: {message}"),
            Self::NoRange => f.write_str("no /17 of 10.64.0.0/10 is free of the host's own routes"),
        }
    }
}

impl std::error::Error for Error {}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let hint = match &error {
            Error::NftMissing => "apt-get install nftables (dnf install nftables), or use network \"none\"",
            Error::Nft(_) => "the kernel needs nf_tables with nat and fib; `sandmill doctor` says what is missing",
            Error::NoRange => "free a part of 10.64.0.0/10, or use network \"none\"",
            Error::Step { .. } => "noded needs CAP_NET_ADMIN and the kernel's veth; or use network \"none\"",
        };
        Self::new(503, "network_unavailable", format!("no network for the sandbox: {error}")).hint(hint)
    }
}
