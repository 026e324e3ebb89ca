//! Watching directories: as a stream, and by asking now and then.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    rc::Rc,
    time::Duration,
};

use tokio::{sync::Mutex, task::AbortHandle};

use super::{
    connect::{late, Call, Stream},
    failure::{Code, Failure},
    filesystem_messages::{
        CreateWatcherResponse, GetWatcherEventsResponse, WatchDirResponse, WatchEvent, WatchRequest, WatcherRequest,
    },
    process_messages::Empty,
    state::Caller,
    watch::Watch,
};
use crate::app::App;

/// Watchers that are asked now and then; each takes an inotify instance, of which the kernel gives 128 by default.
const WATCHER_LIMIT: usize = 64;

#[derive(Default)]
pub struct Watchers {
    known: RefCell<HashMap<String, Polled>>,
    count: Cell<u64>,
}

struct Polled {
    watch: Rc<Mutex<Watch>>,
    /// Keeps the kernel's queue short, and new directories of a tree watched.
    task: AbortHandle,
}

impl Drop for Polled {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Streams what happens in a directory until the client leaves or its time is over.
pub async fn watch_dir(app: &App, call: Call, request: WatchRequest, stream: &Stream) -> Result<(), Failure> {
    let mut watch = begin(app, &call, &request).await?;
    let source = watch.source();
    stream.send(&WatchDirResponse::from(WatchEvent::Start(Empty {}))).await?;
    let keepalive = call.keepalive();
    let mut deadline = std::pin::pin!(tokio::time::sleep(call.timeout.unwrap_or(Duration::MAX / 4)));
    loop {
        tokio::select! {
            biased;
            () = stream.closed() => return Ok(()),
            () = &mut deadline, if call.timeout.is_some() => return Err(late()),
            () = source.readable() => {
                for event in watch.take().await? {
                    if !stream.send(&WatchDirResponse::from(WatchEvent::Filesystem(event))).await? {
                        return Ok(());
                    }
                }
            }
            () = tokio::time::sleep(keepalive) => {
                stream.send(&WatchDirResponse::from(WatchEvent::Keepalive(Empty {}))).await?;
            }
        }
    }
}

async fn begin(app: &App, call: &Call, request: &WatchRequest) -> Result<Watch, Failure> {
    let caller = Caller::of(app, &call.headers)?;
    Watch::begin(caller.path(request.path.clone())?, request, app.procs.accounts().names()).await
}

pub async fn create(app: &App, call: &Call, request: WatchRequest) -> Result<CreateWatcherResponse, Failure> {
    let watchers = &app.e2b.watchers;
    if watchers.known.borrow().len() >= WATCHER_LIMIT {
        let message = format!("there are {WATCHER_LIMIT} watchers already: remove some");
        return Err(Failure::new(Code::ResourceExhausted, message));
    }
    let watch = begin(app, call, &request).await?;
    let source = watch.source();
    let watch = Rc::new(Mutex::new(watch));
    let task = tokio::task::spawn_local({
        let watch = Rc::clone(&watch);
        async move {
            loop {
                source.readable().await;
                watch.lock().await.drain().await;
            }
        }
    });
    watchers.count.set(watchers.count.get() + 1);
    let watcher_id = format!("w{}", watchers.count.get());
    watchers.known.borrow_mut().insert(watcher_id.clone(), Polled { watch, task: task.abort_handle() });
    Ok(CreateWatcherResponse { watcher_id })
}

pub async fn events(app: &App, request: WatcherRequest) -> Result<GetWatcherEventsResponse, Failure> {
    let watch = app.e2b.watchers.known.borrow().get(&request.watcher_id).map(|polled| Rc::clone(&polled.watch));
    let watch = watch.ok_or_else(|| unknown(&request.watcher_id))?;
    let events = watch.lock().await.take().await?;
    Ok(GetWatcherEventsResponse { events })
}

pub fn remove(app: &App, request: &WatcherRequest) -> Result<Empty, Failure> {
    let removed = app.e2b.watchers.known.borrow_mut().remove(&request.watcher_id);
    removed.map(|_| Empty {}).ok_or_else(|| unknown(&request.watcher_id))
}

fn unknown(id: &str) -> Failure {
    Failure::new(Code::NotFound, format!("watcher with id {id} not found"))
}
