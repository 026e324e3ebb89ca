//! Real packets, in network namespaces made for the test: `outside` - a veth pair - the router, in which a [`Network`] runs -
//! sandboxes. Nothing of the machine's own network is touched. Needs root and nft; skipped, and said so, without root.
#![allow(unsafe_code, reason = "unshare, in threads that live for the test only")]

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsFd as _, OwnedFd},
    process::Command,
    sync::mpsc,
    thread,
    time::Duration,
};

use super::*;

const OUTSIDE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
const ROUTER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);
const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
const SHORT: Duration = Duration::from_millis(300);

/// A network namespace, and a thread in it that does what it is told.
struct Place {
    netns: OwnedFd,
    jobs: mpsc::Sender<Box<dyn FnOnce() + Send>>,
}

impl Place {
    fn new() -> Self {
        let (jobs, queue) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let (ready, made) = mpsc::channel();
        thread::spawn(move || {
            // SAFETY: the new namespace is this thread's alone; no descriptor or memory changes its meaning by it.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
            let netns = fs::File::open("/proc/thread-self/ns/net").unwrap();
            ready.send(OwnedFd::from(netns)).unwrap();
            for job in queue {
                job();
            }
        });
        let place = Self { netns: made.recv().unwrap(), jobs };
        place.sh("ip link set lo up");
        place
    }

    fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, answer) = mpsc::channel();
        self.jobs.send(Box::new(move || sender.send(work()).unwrap())).unwrap();
        answer.recv().unwrap()
    }

    fn sh(&self, script: &str) -> String {
        let script = script.to_owned();
        self.run(move || {
            let output = Command::new("sh").args(["-ec", &script]).output().unwrap();
            assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        })
    }

    /// Answers each TCP connection with the address that it seems to come from.
    fn serve_tcp(&self, port: u16) {
        self.run(move || {
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap();
            thread::spawn(move || {
                for stream in listener.incoming() {
                    let mut stream = stream.unwrap();
                    let from = stream.peer_addr().unwrap().ip().to_string();
                    let _ = stream.write_all(from.as_bytes());
                }
            });
        });
    }

    /// Answers each DNS query with itself, marked as an answer.
    fn serve_dns(&self) {
        self.run(|| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 53)).unwrap();
            thread::spawn(move || {
                let mut message = [0; 512];
                while let Ok((length, from)) = socket.recv_from(&mut message) {
                    message[2] |= 0x80;
                    socket.send_to(&message[..length], from).unwrap();
                }
            });
        });
    }

    /// What the server at that address says; `None` if it is out of reach.
    fn fetch(&self, address: Ipv4Addr, port: u16) -> Option<String> {
        self.run(move || {
            let mut stream = TcpStream::connect_timeout(&SocketAddr::from((address, port)), SHORT).ok()?;
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            let mut said = String::new();
            stream.read_to_string(&mut said).ok()?;
            Some(said)
        })
    }

    fn resolve(&self, server: Ipv4Addr) -> Option<Vec<u8>> {
        self.run(move || {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
            socket.set_read_timeout(Some(SHORT)).unwrap();
            socket.send_to(QUERY, (server, 53)).ok()?;
            let mut answer = vec![0; 512];
            let length = socket.recv(&mut answer).ok()?;
            answer.truncate(length);
            Some(answer)
        })
    }
}

/// Of `example.org IN A`.
const QUERY: &[u8] = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07example\x03org\x00\x00\x01\x00\x01";

struct World {
    outside: Place,
    router: Place,
    state_dir: tempfile::TempDir,
}

impl World {
    /// `None` without root.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return None;
        }
        let (outside, router) = (Place::new(), Place::new());
        let into = outside.netns.try_clone().unwrap();
        router.run(move || {
            let mut netlink = Netlink::open().unwrap();
            let ends = (End { name: "up0", mac: [2, 0, 0, 0, 0, 1] }, End { name: "up0", mac: [2, 0, 0, 0, 0, 2] });
            netlink.add_veth(&ends.0, &ends.1, 1400, Some(into.as_fd())).unwrap();
        });
        router.sh(&format!("ip addr add {ROUTER}/24 dev up0; ip link set up0 up; ip route add default via {OUTSIDE}"));
        // The metadata service of a cloud, one hop away.
        outside.sh(&format!(
            "ip addr add {OUTSIDE}/24 dev up0; ip link set up0 up; ip addr add {METADATA}/32 dev lo; \
             ip route add 10.0.0.0/8 via {ROUTER}"
        ));
        outside.serve_tcp(80);
        outside.serve_dns();
        router.serve_tcp(80);
        let state_dir = tempfile::tempdir().unwrap();
        fs::write(state_dir.path().join("resolv.conf"), format!("nameserver {OUTSIDE}\n")).unwrap();
        Some(Self { outside, router, state_dir })
    }

    fn network(&self) -> std::sync::Arc<Network> {
        let dir = self.state_dir.path();
        std::sync::Arc::new(Network::with_resolv_conf(dir, &dir.join("resolv.conf")))
    }

    fn attach(&self, network: &std::sync::Arc<Network>, id: &str, slot: u32) -> (Place, Attached) {
        let sandbox = Place::new();
        let (network, id, netns) = (network.clone(), id.to_owned(), sandbox.netns.try_clone().unwrap());
        let attached = self.router.run(move || network.attach(&id, slot, netns.as_fd()).unwrap());
        (sandbox, attached)
    }

    fn interfaces(&self) -> String {
        self.router.sh("ip -o link")
    }
}

#[test]
fn what_a_sandbox_can_reach_and_what_not() {
    let Some(world) = World::new() else { return };
    let network = world.network();
    let (one, at_one) = world.attach(&network, "ione", 0);
    let (two, at_two) = world.attach(&network, "itwo", 1);
    two.serve_tcp(80);

    let seen = one.fetch(OUTSIDE, 80).expect("the outside is reachable");
    assert_eq!(seen, ROUTER.to_string(), "masqueraded");
    assert!(one.sh("ip -o link show eth0").contains("mtu 1400"), "the uplink's packet size");

    assert_eq!(one.fetch(at_two.ip, 80), None, "another sandbox");
    assert_eq!(one.fetch(ROUTER, 80), None, "the host's own address");
    assert_eq!(one.fetch(at_one.dns, 80), None, "the gateway's other ports");
    assert_eq!(world.router.fetch(METADATA, 80).as_deref(), Some("203.0.113.2"), "the host may ask for metadata");
    assert_eq!(one.fetch(METADATA, 80), None, "metadata");
    assert_eq!(world.outside.fetch(at_one.ip, 80), None, "nobody outside reaches a sandbox");
    two.sh("ip addr show dev eth0 | grep -q inet6 && exit 1 || true");

    let answer = one.resolve(at_one.dns).expect("names resolve");
    assert_eq!((answer[2] & 0x80, &answer[12..]), (0x80, &QUERY[12..]));
}

#[test]
fn a_spoofed_source_goes_nowhere() {
    let Some(world) = World::new() else { return };
    let network = world.network();
    let (one, at_one) = world.attach(&network, "ione", 0);
    let (_two, at_two) = world.attach(&network, "itwo", 1);
    let inbox = world.outside.run(|| {
        let inbox = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 7777)).unwrap();
        inbox.set_read_timeout(Some(SHORT)).unwrap();
        inbox
    });
    let mut message = [0; 16];
    for (source, passes) in
        [(at_one.ip, true), (at_two.ip, false), (Ipv4Addr::new(8, 8, 8, 8), false), (at_one.dns, false)]
    {
        one.sh(&format!("ip addr add {source}/32 dev lo 2>/dev/null || true"));
        one.run(move || UdpSocket::bind((source, 0)).unwrap().send_to(b"x", (OUTSIDE, 7777)).ok());
        assert_eq!(inbox.recv(&mut message).is_ok(), passes, "from {source}");
    }
}

#[test]
fn nothing_is_left() {
    let Some(world) = World::new() else { return };
    let before = (
        world.interfaces().lines().count(),
        world.router.sh("nft list ruleset; cat /proc/sys/net/ipv4/conf/up0/forwarding"),
    );
    let network = world.network();
    let (_one, _) = world.attach(&network, "ione", 0);
    let (two, _) = world.attach(&network, "itwo", 1);
    let name = network.names.host_end(1);
    {
        let network = network.clone();
        world.router.run(move || network.detach("ione").unwrap());
    }
    assert!(!world.interfaces().contains(&network.names.host_end(0)));
    assert!(world.interfaces().contains(&name));
    assert!(two.fetch(OUTSIDE, 80).is_some(), "the other goes on");
    world.router.run(move || network.close().unwrap());
    let after = (
        world.interfaces().lines().count(),
        world.router.sh("nft list ruleset; cat /proc/sys/net/ipv4/conf/up0/forwarding"),
    );
    assert_eq!(after, before);
    assert!(!world.state_dir.path().join("network.json").exists());
}

#[test]
fn a_noded_after_a_kill_takes_over() {
    let Some(world) = World::new() else { return };
    let network = world.network();
    let (one, at_one) = world.attach(&network, "ione", 0);
    let (_two, _) = world.attach(&network, "itwo", 1);
    let names = network.names.clone();
    // Only its descriptors and its threads go.
    drop(network);

    let network = world.network();
    let again = network.clone();
    world.router.run(move || again.adopt(&[("ione".to_owned(), 0)]).unwrap());
    assert!(!world.interfaces().contains(&names.host_end(1)), "a stray is removed");
    assert!(one.fetch(OUTSIDE, 80).is_some(), "a live sandbox goes on");
    assert!(one.resolve(at_one.dns).is_some(), "its names too");

    drop(network);
    let network = world.network();
    world.router.run(move || network.adopt(&[]).unwrap());
    assert!(!world.interfaces().contains(&names.prefix()), "all gone");
    assert_eq!(world.router.sh("nft list ruleset"), "");
}
