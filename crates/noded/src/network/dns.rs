//! The DNS forwarder: passes queries of sandboxes on to the host's resolvers, also where those listen on loopback only.
//! Messages pass as they are, over UDP and TCP; answers are cached nowhere.

use std::{
    cell::RefCell,
    collections::HashMap,
    fs, io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    rc::Rc,
    thread::JoinHandle,
    time::{Duration, SystemTime},
};

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream, UdpSocket},
    sync::oneshot,
    task::LocalSet,
    time::timeout,
};

use super::plan::Range;

const PORT: u16 = 53;
/// How long one resolver may take before the next is asked; two are asked at most.
const ANSWER: Duration = Duration::from_secs(3);
const TRIES: usize = 2;
/// How long one TCP connection may last.
const TCP: Duration = Duration::from_secs(20);
/// Queries and TCP connections at once, in all and of one sandbox. What comes beyond is dropped: resolvers ask again.
const IN_ALL: usize = 1024;
const OF_ONE: usize = 64;
/// Largest message over UDP.
const MESSAGE_BYTES: usize = 65_535;
const SERVFAIL: u8 = 2;

/// Runs on a thread of its own until dropped.
pub struct Forwarder {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Forwarder {
    /// Listens at the range's gateway, in the network namespace of the calling thread.
    pub fn start(range: Range, resolv_conf: &Path) -> io::Result<Self> {
        let address = SocketAddr::from((range.gateway(), PORT));
        let udp = std::net::UdpSocket::bind(address)?;
        let tcp = std::net::TcpListener::bind(address)?;
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = oneshot::channel();
        let resolv_conf = resolv_conf.to_owned();
        let thread = std::thread::Builder::new().name("dns".to_owned()).spawn(move || {
            let served = LocalSet::new().block_on(&runtime, async {
                let service = Rc::new(Service {
                    range,
                    udp: UdpSocket::from_std(udp)?,
                    resolvers: RefCell::new(Resolvers::new(resolv_conf)),
                    running: RefCell::default(),
                });
                let tcp = TcpListener::from_std(tcp)?;
                tokio::select! {
                    _ = stopped => Ok(()),
                    never = service.serve_udp() => never,
                    never = service.serve_tcp(&tcp) => never,
                }
            });
            if let Err(error) = served {
                eprintln!("noded: dns: {error}");
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It said what went wrong, if anything did.
            let _ = thread.join();
        }
    }
}

struct Service {
    range: Range,
    udp: UdpSocket,
    resolvers: RefCell<Resolvers>,
    running: RefCell<HashMap<Ipv4Addr, usize>>,
}

/// A place among the queries in progress.
struct Place {
    service: Rc<Service>,
    of: Ipv4Addr,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut running = self.service.running.borrow_mut();
        if let Some(count) = running.get_mut(&self.of) {
            *count -= 1;
            if *count == 0 {
                running.remove(&self.of);
            }
        }
    }
}

impl Service {
    /// Only sandboxes are served, and none of them can keep the others out.
    fn admit(self: &Rc<Self>, from: SocketAddr) -> Option<Place> {
        let IpAddr::V4(of) = from.ip() else { return None };
        let mut running = self.running.borrow_mut();
        if !self.range.contains(of) || of == self.range.gateway() || running.values().sum::<usize>() >= IN_ALL {
            return None;
        }
        let count = running.entry(of).or_default();
        if *count >= OF_ONE {
            return None;
        }
        *count += 1;
        drop(running);
        Some(Place { service: Rc::clone(self), of })
    }

    async fn serve_udp(self: &Rc<Self>) -> io::Result<()> {
        let mut message = vec![0; MESSAGE_BYTES];
        loop {
            let Ok((length, from)) = self.udp.recv_from(&mut message).await else {
                // An earlier answer could not be delivered; that is its receiver's business.
                tokio::task::yield_now().await;
                continue;
            };
            let query = &message[..length];
            // A query is at least a header, and an answer isn't one.
            if length < 12 || query[2] & 0x80 != 0 {
                continue;
            }
            let Some(place) = self.admit(from) else { continue };
            let query = query.to_vec();
            tokio::task::spawn_local(async move {
                let answer = place.service.ask(&query).await;
                // A sandbox that has ended needs no answer.
                let _ = place.service.udp.send_to(&answer, from).await;
            });
        }
    }

    async fn ask(&self, query: &[u8]) -> Vec<u8> {
        let resolvers = self.resolvers.borrow_mut().current();
        for resolver in resolvers.into_iter().take(TRIES) {
            if let Ok(Ok(answer)) = timeout(ANSWER, ask_one(resolver, query)).await {
                return answer;
            }
        }
        let mut failure = query.to_vec();
        failure[2] |= 0x80;
        failure[3] = (failure[3] & 0x70) | 0x80 | SERVFAIL;
        failure
    }

    async fn serve_tcp(self: &Rc<Self>, listener: &TcpListener) -> io::Result<()> {
        loop {
            let (mut client, from) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(_) => {
                    // Out of descriptors, or a client that left while it waited.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    continue;
                }
            };
            let Some(place) = self.admit(from) else { continue };
            tokio::task::spawn_local(async move {
                let resolvers = place.service.resolvers.borrow_mut().current();
                for resolver in resolvers.into_iter().take(TRIES) {
                    if let Ok(Ok(mut upstream)) = timeout(ANSWER, TcpStream::connect((resolver, PORT))).await {
                        // Whatever ends it, the client sees its end.
                        let _ = timeout(TCP, copy_bidirectional(&mut client, &mut upstream)).await;
                        return;
                    }
                }
            });
        }
    }
}

async fn ask_one(resolver: IpAddr, query: &[u8]) -> io::Result<Vec<u8>> {
    let any: IpAddr = match resolver {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    // A fresh port for each query, as resolvers do against forged answers.
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect((resolver, PORT)).await?;
    socket.send(query).await?;
    let mut answer = vec![0; MESSAGE_BYTES];
    loop {
        let length = socket.recv(&mut answer).await?;
        if length >= 12 && answer[..2] == query[..2] && answer[2] & 0x80 != 0 {
            answer.truncate(length);
            return Ok(answer);
        }
    }
}

/// The host's resolvers; their file is read again when it has changed.
struct Resolvers {
    path: PathBuf,
    read_at: Option<SystemTime>,
    list: Vec<IpAddr>,
}

impl Resolvers {
    fn new(path: PathBuf) -> Self {
        Self { path, read_at: None, list: Vec::new() }
    }

    fn current(&mut self) -> Vec<IpAddr> {
        let modified = fs::metadata(&self.path).and_then(|about| about.modified()).ok();
        if self.list.is_empty() || modified != self.read_at {
            self.list = resolvers(&self.path);
            self.read_at = modified;
        }
        self.list.clone()
    }
}

/// Those of a resolv.conf; like libc, the host itself when it names none.
pub fn resolvers(path: &Path) -> Vec<IpAddr> {
    let list = parse(&fs::read_to_string(path).unwrap_or_default());
    if list.is_empty() {
        return vec![Ipv4Addr::LOCALHOST.into()];
    }
    list
}

fn parse(text: &str) -> Vec<IpAddr> {
    let words = text.lines().map(str::split_ascii_whitespace);
    words.filter_map(|mut words| (words.next()? == "nameserver").then(|| words.next()?.parse().ok())?).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolv_conf() {
        let text = "# a comment\nsearch x.y\nnameserver 10.0.0.1\nnameserver fe80::1%eth0\n nameserver ::1 \n";
        let expected: [IpAddr; 2] = ["10.0.0.1".parse().unwrap(), "::1".parse().unwrap()];
        assert_eq!(parse(text), expected);
        assert_eq!(resolvers(Path::new("/nonexistent")), [IpAddr::from(Ipv4Addr::LOCALHOST)]);
    }
}
