//! Between a thread that reads or writes an archive and the client's connection.

use std::{
    io::{self, Read, Write},
    mem,
    time::Duration,
};

use bytes::{Buf as _, Bytes};
use tokio::{runtime::Handle, sync::mpsc};

/// What is collected before it is sent.
const CHUNK_BYTES: usize = 256 << 10;
/// A client that takes or sends nothing for this long is gone.
const STALLED: Duration = Duration::from_secs(300);

/// Sends what is written, in chunks; waits while the client is slow.
pub struct Outlet {
    sender: mpsc::Sender<io::Result<Bytes>>,
    runtime: Handle,
    buffer: Vec<u8>,
}

impl Outlet {
    pub fn new(sender: mpsc::Sender<io::Result<Bytes>>, runtime: Handle) -> Self {
        Self { sender, runtime, buffer: Vec::with_capacity(CHUNK_BYTES) }
    }

    fn send(&self, chunk: io::Result<Bytes>) -> io::Result<()> {
        let sent = self.runtime.block_on(async { tokio::time::timeout(STALLED, self.sender.send(chunk)).await });
        match sent {
            Ok(Ok(())) => Ok(()),
            _ => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Breaks the answer off, so that nobody takes a part for the whole.
    pub fn fail(&self, error: io::Error) {
        let _ = self.send(Err(error));
    }
}

impl Write for Outlet {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let taken = data.len().min(CHUNK_BYTES - self.buffer.len());
        self.buffer.extend_from_slice(&data[..taken]);
        if self.buffer.len() == CHUNK_BYTES {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let chunk = mem::replace(&mut self.buffer, Vec::with_capacity(CHUNK_BYTES));
        self.send(Ok(chunk.into()))
    }
}

/// Reads what a client sends; ends when the sender is dropped.
pub struct Inlet {
    receiver: mpsc::Receiver<Bytes>,
    chunk: Bytes,
}

impl Inlet {
    pub fn new(receiver: mpsc::Receiver<Bytes>) -> Self {
        Self { receiver, chunk: Bytes::new() }
    }
}

impl Read for Inlet {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.chunk.is_empty() {
            // The sending side has the deadline: it gives up on a client that stalls.
            match self.receiver.blocking_recv() {
                Some(chunk) => self.chunk = chunk,
                None => return Ok(0),
            }
        }
        let count = buffer.len().min(self.chunk.len());
        self.chunk.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}
