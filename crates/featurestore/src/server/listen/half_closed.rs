//! Clients that end their side of a connection once they have sent their request.
//!
//! Some wait for the answer all the same; most are gone, and nobody is to capture anything for them.
//! The end of the stream looks alike, so they are asked: with the interim answer that HTTP/1.1 lets a
//! server send at any time. Who is gone refuses it, and the connection fails.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::body::HttpBody;
use hyper::{Request, Version, body::Frame, service::Service};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Interval, Sleep, interval, sleep},
};

/// Tells a client nothing that it does not know, unless it is gone.
const ASK: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// How often it is looked whether the question was refused.
const LOOK: Duration = Duration::from_millis(100);

/// A connection that shows the end of its stream only when nothing is left to answer.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    answering: Answering,
    /// Something is written that the system has not taken yet.
    unsent: bool,
    /// Longest time that the client may take nothing.
    stall: Duration,
    /// Since it took nothing.
    stalled: Option<Pin<Box<Sleep>>>,
    /// The client has ended its side, and has been asked whether it is still there.
    ended: Option<Interval>,
}

impl Connection {
    /// A client that takes no byte of an answer for `stall` is cut off.
    pub(super) fn new(stream: TcpStream, stall: Duration) -> Self {
        let answering = Answering::default();
        Self { stream, answering, unsent: false, stall, stalled: None, ended: None }
    }

    /// An error once nothing was written for too long.
    fn written(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let stall = self.stall;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(stall)));
        stalled.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }

    pub(super) fn answering(&self) -> Answering {
        self.answering.clone()
    }

    /// Whether the client waits for an answer, or for the rest of one.
    fn is_awaited(&self) -> bool {
        self.answering.0.load(Ordering::Relaxed) || self.unsent
    }

    fn ask(&self) -> io::Result<()> {
        if self.unsent {
            return Ok(()); // that will tell
        }
        match self.stream.try_write(ASK) {
            Ok(sent) if sent == ASK.len() => Ok(()),
            Ok(_) => Err(io::ErrorKind::WriteZero.into()), // nothing else fills the buffer
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(e) => Err(e),
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.ended.is_none() {
            let before = buffer.filled().len();
            ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
            if buffer.filled().len() > before || buffer.remaining() == 0 || !self.is_awaited() {
                return Poll::Ready(Ok(()));
            }
            self.ask()?;
            self.ended = Some(interval(LOOK));
        }
        while self.is_awaited() {
            if let Some(refused) = self.stream.take_error()? {
                return Poll::Ready(Err(refused));
            }
            ready!(self.ended.as_mut().expect("set above").poll_tick(context));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.unsent = true;
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.written(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.unsent = true;
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.written(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// Called when everything is written.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(context))?;
        self.unsent = false;
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Whether a request has come in whole and its answer has not begun.
#[derive(Clone, Debug, Default)]
pub(super) struct Answering(Arc<AtomicBool>);

impl Answering {
    /// Hands a request on, and knows from this call on where it is.
    pub(super) fn answer<S, B>(
        self,
        service: &S,
        request: Request<B>,
    ) -> impl Future<Output = Result<S::Response, S::Error>> + use<S, B>
    where
        S: Service<Request<Whole<B>>>,
        B: HttpBody,
    {
        // Older clients know no interim answers.
        let answering = (request.version() >= Version::HTTP_11).then(|| self.clone());
        let answer = service.call(request.map(|body| Whole::new(body, answering)));
        async move {
            let answer = answer.await;
            self.0.store(false, Ordering::Relaxed);
            answer
        }
    }
}

/// The body of a request, which tells when it is there as a whole.
#[derive(Debug)]
pub(super) struct Whole<B> {
    body: Pin<Box<B>>,
    answering: Option<Answering>,
}

impl<B: HttpBody> Whole<B> {
    fn new(body: B, answering: Option<Answering>) -> Self {
        let whole = Self { body: Box::pin(body), answering };
        whole.tell();
        whole
    }

    fn tell(&self) {
        if let Some(answering) = &self.answering
            && self.body.is_end_stream()
        {
            answering.0.store(true, Ordering::Relaxed);
        }
    }
}

impl<B: HttpBody> HttpBody for Whole<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = ready!(self.body.as_mut().poll_frame(context));
        self.tell();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}
