//! The gateway in front of a stand-in for sandboxd that speaks the same socket.

use std::{
    convert::Infallible,
    io::IoSliceMut,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::Path,
    sync::{
        atomic::{AtomicUsize, Ordering},
        Arc,
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustix::net::{recvmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use sandmill_wire::HANDOVER;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, Interest},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{mpsc, oneshot},
    time::timeout,
};

use super::*;

const SOON: Duration = Duration::from_secs(5);

#[derive(Default)]
struct Seen {
    connections: AtomicUsize,
    touches: AtomicUsize,
    /// Renewals of a lease of anything but the one sandbox.
    strays: AtomicUsize,
    /// Calls of `/hang` whose client has left.
    left: AtomicUsize,
}

struct OneSandbox {
    socket: PathBuf,
    seen: Arc<Seen>,
}

impl Directory for OneSandbox {
    fn route(&self, id: &str) -> Option<Route> {
        (id == "ilives").then(|| Route { socket: self.socket.clone(), token: "secret".to_owned() })
    }

    fn ended(&self, id: &str) -> Option<serde_json::Value> {
        (id == "igone").then(|| serde_json::json!({"id": id, "cause": "oom"}))
    }

    fn touch(&self, id: &str) {
        let count = if id == "ilives" { &self.seen.touches } else { &self.seen.strays };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

struct Guard(Arc<Seen>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.left.fetch_add(1, Ordering::Relaxed);
    }
}

/// A body fed by the test's server, chunk by chunk.
struct Chunks(mpsc::Receiver<Result<Bytes, std::io::Error>>);

impl http_body::Body for Chunks {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, std::io::Error>>> {
        self.0.poll_recv(cx).map(|chunk| chunk.map(|chunk| chunk.map(http_body::Frame::data)))
    }
}

type AnyBody = http_body_util::combinators::UnsyncBoxBody<Bytes, std::io::Error>;

fn text(text: impl Into<String>) -> Response<AnyBody> {
    Response::new(Full::new(Bytes::from(text.into())).map_err(|never| match never {}).boxed_unsync())
}

async fn inside(seen: Arc<Seen>, mut request: Request<Incoming>) -> Result<Response<AnyBody>, Infallible> {
    Ok(match request.uri().path() {
        "/headers" => text(format!("{:?}", request.headers())),
        "/echo" => {
            let (sender, receiver) = mpsc::channel(1);
            tokio::spawn(async move {
                while let Some(Ok(frame)) = request.body_mut().frame().await {
                    let Ok(data) = frame.into_data() else { continue };
                    if sender.send(Ok(data)).await.is_err() {
                        return;
                    }
                }
            });
            Response::new(Chunks(receiver).boxed_unsync())
        }
        "/breaks" => {
            let (sender, receiver) = mpsc::channel(1);
            tokio::spawn(async move {
                let _ = sender.send(Ok(Bytes::from_static(b"half"))).await;
                tokio::time::sleep(Duration::from_millis(20)).await;
                let _ = sender.send(Err(std::io::ErrorKind::BrokenPipe.into())).await;
            });
            Response::new(Chunks(receiver).boxed_unsync())
        }
        "/hang" => {
            let _guard = Guard(seen);
            std::future::pending().await
        }
        "/sandmill/v1/tcp/3000" | "/socket" => {
            let protocol = request.headers()[http::header::UPGRADE].clone();
            let to_port = request.uri().path().ends_with("3000");
            tokio::spawn(async move {
                let stream = TokioIo::new(hyper::upgrade::on(&mut request).await.unwrap());
                if to_port {
                    let service = service_fn(|request: Request<Incoming>| async move {
                        Ok::<_, Infallible>(text(format!("port 3000: {:?}", request.headers())))
                    });
                    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
                } else {
                    let (mut read, mut write) = tokio::io::split(stream);
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                }
            });
            let mut reply = text("");
            *reply.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            headers::set_upgrade(reply.headers_mut(), protocol);
            reply
        }
        path if path.starts_with("/sandmill/v1/tcp/") => {
            let mut reply = text("{}");
            *reply.status_mut() = StatusCode::BAD_GATEWAY;
            reply
        }
        path => text(format!("inside: {path}")),
    })
}

async fn serve_unix(listener: UnixListener, seen: Arc<Seen>) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        seen.connections.fetch_add(1, Ordering::Relaxed);
        let seen = Arc::clone(&seen);
        tokio::spawn(async move {
            let mut first = [0_u8; 1];
            let received = stream
                .async_io(Interest::READABLE, || {
                    Ok(rustix::net::recv(&stream, &mut first[..], RecvFlags::PEEK).map(|(length, _)| length)?)
                })
                .await;
            match received {
                Ok(1) if first[0] == HANDOVER => {
                    let (client, prefix) = taken(stream).await;
                    handed_over(client, prefix).await;
                }
                Ok(1) => {
                    let service = service_fn(move |request| inside(Arc::clone(&seen), request));
                    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).with_upgrades().await;
                }
                _ => {}
            }
        });
    }
}

async fn taken(stream: UnixStream) -> (TcpStream, Vec<u8>) {
    stream.readable().await.unwrap();
    let mut data = vec![0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(&stream, &mut [IoSliceMut::new(&mut data)], &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let descriptor: OwnedFd = control
        .drain()
        .find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        })
        .unwrap();
    data.truncate(received.bytes);
    let length = u32::from_be_bytes(data[1..5].try_into().unwrap()) as usize;
    assert_eq!(data.len(), 5 + length);
    (TcpStream::from_std(descriptor.into()).unwrap(), data.split_off(5))
}

/// Says back what it reads, in capitals.
async fn handed_over(mut client: TcpStream, mut bytes: Vec<u8>) {
    loop {
        bytes.make_ascii_uppercase();
        client.write_all(&bytes).await.unwrap();
        bytes.resize(1024, 0);
        let length = client.read(&mut bytes).await.unwrap_or(0);
        if length == 0 {
            return;
        }
        bytes.truncate(length);
    }
}

struct World {
    address: std::net::SocketAddr,
    seen: Arc<Seen>,
    stop: Option<oneshot::Sender<()>>,
    served: tokio::task::JoinHandle<()>,
    _dir: tempfile::TempDir,
}

impl World {
    async fn new() -> Self {
        Self::at(Path::new("s")).await
    }

    async fn at(below: &Path) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join(below);
        std::fs::create_dir_all(&home).unwrap();
        // A path that is too long is bound from its directory's short alias.
        let alias = dir.path().join("a");
        std::os::unix::fs::symlink(&home, &alias).unwrap();
        let seen = Arc::new(Seen::default());
        tokio::spawn(serve_unix(UnixListener::bind(alias.join("sandboxd.sock")).unwrap(), Arc::clone(&seen)));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let directory = Arc::new(OneSandbox { socket: home.join("sandboxd.sock"), seen: Arc::clone(&seen) });
        let (stop, stopped) = oneshot::channel::<()>();
        let served = tokio::spawn(serve(listener, String::new(), directory, async {
            let _ = stopped.await;
        }));
        Self { address, seen, stop: Some(stop), served, _dir: dir }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// One request on a connection of its own: the whole answer as text, and whether it ended as HTTP ends one.
    async fn ask(&self, path: &str, headers: &str) -> String {
        let mut stream = self.connect().await;
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        timeout(SOON, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        answer
    }
}

const US: &str = "e2b-sandbox-id: ilives\r\nx-access-token: secret\r\n";

async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut read = Vec::new();
    while !read.ends_with(end.as_bytes()) {
        let mut byte = [0];
        timeout(SOON, stream.read_exact(&mut byte)).await.expect("in time").expect("more bytes");
        read.push(byte[0]);
    }
    String::from_utf8(read).unwrap()
}

#[tokio::test]
async fn requests_find_their_sandbox() {
    let world = World::new().await;
    assert!(world.ask("/a?b=c", US).await.ends_with("inside: /a"));
    assert!(world.ask("/health", "").await.starts_with("HTTP/1.1 204"));
    assert!(world.ask("/x", "").await.contains("sandbox_not_named"));
    let unknown = world.ask("/x", "e2b-sandbox-id: iother\r\n").await;
    assert!(unknown.starts_with("HTTP/1.1 502"), "{unknown}");
    assert!(unknown.contains(r#""error_code":"sandbox_not_found""#) && unknown.contains(r#""sandboxId":"iother""#));
    let gone = world.ask("/x", "e2b-sandbox-id: igone\r\n").await;
    assert!(gone.contains(r#""error_code":"sandbox_gone""#) && gone.contains(r#""cause":"oom""#), "{gone}");
    let until = Instant::now() + SOON;
    while world.seen.touches.load(Ordering::Relaxed) < 2 {
        assert!(Instant::now() < until, "its end renews the lease too");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // More than two, if the round that renews for open requests came by.
    assert_eq!(world.seen.strays.load(Ordering::Relaxed), 0, "only what is there has a lease");
}

#[tokio::test]
async fn only_the_token_opens() {
    let world = World::new().await;
    let missing = world.ask("/a", "e2b-sandbox-id: ilives\r\n").await;
    assert!(missing.starts_with("HTTP/1.1 401") && missing.contains("token_missing"), "{missing}");
    let wrong = world.ask("/a", "e2b-sandbox-id: ilives\r\nx-access-token: Secret\r\n").await;
    assert!(wrong.contains("token_wrong"), "{wrong}");
    assert_eq!(world.seen.touches.load(Ordering::Relaxed), 0, "a lease is renewed by who may use it only");
    let bearer = world.ask("/a", "e2b-sandbox-id: ilives\r\nauthorization: Bearer secret\r\n").await;
    assert!(bearer.ends_with("inside: /a"), "{bearer}");
    let user = world.ask("/headers", &format!("{US}authorization: Basic dXNlcjo=\r\n")).await;
    assert!(user.contains("Basic dXNlcjo="), "{user}");
}

#[tokio::test]
async fn connections_are_used_again() {
    let world = World::new().await;
    let mut stream = world.connect().await;
    for _ in 0..50 {
        stream.write_all(format!("GET /a HTTP/1.1\r\nhost: x\r\n{US}\r\n").as_bytes()).await.unwrap();
        assert!(read_until(&mut stream, "inside: /a").await.starts_with("HTTP/1.1 200"));
    }
    assert_eq!(world.seen.connections.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn bodies_stream_both_ways() {
    let world = World::new().await;
    let mut stream = world.connect().await;
    let head = format!("POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n{US}\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    for word in ["one", "two"] {
        stream.write_all(format!("3\r\n{word}\r\n").as_bytes()).await.unwrap();
        // Each comes back before the next is sent.
        read_until(&mut stream, &format!("3\r\n{word}\r\n")).await;
    }
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    read_until(&mut stream, "0\r\n\r\n").await;
}

#[tokio::test]
async fn a_broken_answer_has_no_end() {
    let world = World::new().await;
    let broken = world.ask("/breaks", US).await;
    assert!(broken.contains("half") && !broken.ends_with("0\r\n\r\n"), "{broken}");
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_inside() {
    let world = World::new().await;
    let mut stream = world.connect().await;
    stream.write_all(format!("GET /hang HTTP/1.1\r\nhost: x\r\n{US}\r\n").as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(stream);
    let until = Instant::now() + SOON;
    while world.seen.left.load(Ordering::Relaxed) == 0 {
        assert!(Instant::now() < until, "sandboxd still works for nobody");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn upgrades_pass() {
    let world = World::new().await;
    let mut stream = world.connect().await;
    let head = format!("GET /socket HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n{US}\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    assert!(read_until(&mut stream, "\r\n\r\n").await.starts_with("HTTP/1.1 101"));
    stream.write_all(b"hello").await.unwrap();
    assert_eq!(read_until(&mut stream, "hello").await, "hello");
}

#[tokio::test]
async fn ports_inside() {
    let world = World::new().await;
    let open = world.ask("/a", &format!("{US}e2b-sandbox-port: 3000\r\n")).await;
    assert!(open.contains("port 3000:") && !open.contains("secret"), "{open}");
    let closed = world.ask("/a", &format!("{US}e2b-sandbox-port: 3001\r\n")).await;
    assert!(closed.starts_with("HTTP/1.1 502") && closed.contains(r#""error_code":"port_closed""#), "{closed}");
    assert!(closed.contains(r#""port":3001"#), "{closed}");
}

#[tokio::test]
async fn a_connection_is_handed_over() {
    let mut world = World::new().await;
    let mut stream = world.connect().await;
    let head = format!(
        "GET {} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: sandmill\r\n{US}\r\nearly",
        attach::PATH
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    assert!(read_until(&mut stream, "\r\n\r\n").await.starts_with("HTTP/1.1 101"));
    assert_eq!(read_until(&mut stream, "EARLY").await, "EARLY");
    // The gateway is not in the way any more.
    drop(world.stop.take());
    timeout(SOON, &mut world.served).await.unwrap().unwrap();
    stream.write_all(b"later").await.unwrap();
    assert_eq!(read_until(&mut stream, "LATER").await, "LATER");
}

/// A figure, not a check: `cargo test --release -- --ignored --nocapture the_price`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn the_price_of_the_hop() {
    const ROUNDS: usize = 5000;
    let world = World::new().await;
    // The idle crowd must cost nothing.
    let mut crowd = Vec::new();
    for _ in 0..2000 {
        crowd.push(world.connect().await);
    }
    let socket = world._dir.path().join("a/sandboxd.sock");
    let request = format!("GET /a HTTP/1.1\r\nhost: x\r\n{US}\r\n");
    let mut direct = UnixStream::connect(socket).await.unwrap();
    let mut through = world.connect().await;
    let mut buffer = [0; 4096];
    let (mut one, mut two) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let start = Instant::now();
        direct.write_all(request.as_bytes()).await.unwrap();
        assert!(direct.read(&mut buffer).await.unwrap() > 0);
        one.push(start.elapsed());
        let start = Instant::now();
        through.write_all(request.as_bytes()).await.unwrap();
        assert!(through.read(&mut buffer).await.unwrap() > 0);
        two.push(start.elapsed());
    }
    let mut attached = Vec::new();
    for _ in 0..500 {
        let mut stream = world.connect().await;
        let start = Instant::now();
        let head = format!(
            "GET {} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: sandmill\r\n{US}\r\nx",
            attach::PATH
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        while stream.read(&mut buffer).await.unwrap() > 0 && !buffer.contains(&b'X') {}
        attached.push(start.elapsed());
        buffer.fill(0);
    }
    for (name, mut times) in [("direct", one), ("through", two), ("attach", attached)] {
        times.sort_unstable();
        println!("{name}: p50 {:?}, p99 {:?}", times[times.len() / 2], times[times.len() * 99 / 100]);
    }
}

#[tokio::test]
async fn attach_needs_its_upgrade() {
    let world = World::new().await;
    assert!(world.ask(attach::PATH, US).await.starts_with("HTTP/1.1 426"));
}

#[tokio::test]
async fn long_paths() {
    let world = World::at(Path::new(&"d/".repeat(80))).await;
    assert!(world.ask("/a", US).await.ends_with("inside: /a"));
}

#[tokio::test]
async fn browsers() {
    let world = World::new().await;
    let mut stream = world.connect().await;
    stream
        .write_all(
            b"OPTIONS /files HTTP/1.1\r\nhost: x\r\norigin: http://p\r\naccess-control-request-method: POST\r\n\
              access-control-request-headers: x-access-token\r\n\r\n",
        )
        .await
        .unwrap();
    let preflight = read_until(&mut stream, "\r\n\r\n").await;
    assert!(preflight.contains("access-control-allow-headers: x-access-token"), "{preflight}");
    let answer = world.ask("/a", &format!("{US}origin: http://p\r\n")).await;
    assert!(answer.contains("access-control-allow-origin: *"), "{answer}");
}

#[tokio::test]
async fn http2() {
    let world = World::new().await;
    let stream = TokioIo::new(world.connect().await);
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    let request = Request::post("http://49983-ilives.sandbox.test/echo")
        .header("x-access-token", "secret")
        .body(Full::new(Bytes::from(vec![7; 3 << 20])))
        .unwrap();
    let answer = timeout(SOON, sender.send_request(request)).await.unwrap().unwrap();
    let body = timeout(SOON, answer.into_body().collect()).await.unwrap().unwrap().to_bytes();
    assert_eq!(body.len(), 3 << 20);
}
