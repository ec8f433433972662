//! Images made in memory: what stands in them, and what stands there when the store fills up.

use super::*;
use crate::check::{Finding, Observer, check};
use mica_block::{ChangeFuture, ErrorKind, IoFuture, Run, RunKind, StoreIdentity, Witness};
use mica_qcow2_format::{Compression, Header, Version};
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

/// A store that takes so many bytes and no more.
struct Room {
    bytes: Mutex<Vec<u8>>,
    len_max: usize,
}

impl Room {
    fn new(len_max: usize) -> Arc<Self> {
        Arc::new(Self { bytes: Mutex::default(), len_max })
    }

    fn resize(&self, len: usize) -> Result<()> {
        if len > self.len_max {
            return Err(Error::new(ErrorKind::NoSpace, "the device is full"));
        }
        self.bytes.lock().expect("nobody panicked").resize(len, 0);
        Ok(())
    }
}

impl Store for Room {
    fn read_at(&self, mut buf: Buf, offset: HostOffset) -> IoFuture {
        let at = usize::try_from(offset.bytes()).expect("small");
        let bytes = self.bytes.lock().expect("nobody panicked");
        let there = bytes.get(at..).unwrap_or_default();
        let len = there.len().min(buf.len());
        buf.put(0, &there[..len]);
        buf.fill_part(len..buf.len(), 0);
        IoFuture::Ready(Some((Ok(()), buf)))
    }

    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let at = usize::try_from(offset.bytes()).expect("small");
        let end = (at + buf.len()).max(self.bytes.lock().expect("nobody panicked").len());
        let grown = self.resize(end);
        if grown.is_ok() {
            let mut bytes = self.bytes.lock().expect("nobody panicked");
            bytes[at..at + buf.len()].copy_from_slice(&buf);
        }
        IoFuture::Ready(Some((grown, buf)))
    }

    fn set_len(&self, len: u64) -> ChangeFuture {
        let done = self.resize(usize::try_from(len).expect("small"));
        Box::pin(async move { done })
    }

    fn space(&self, _change: Space, offset: HostOffset, len: u64) -> ChangeFuture {
        let end = usize::try_from(offset.bytes() + len).expect("small");
        let len = self.bytes.lock().expect("nobody panicked").len();
        let done = self.resize(end.max(len));
        Box::pin(async move { done })
    }

    fn sync(&self) -> ChangeFuture {
        Box::pin(async { Ok(()) })
    }

    fn len(&self) -> Result<u64> {
        Ok(self.bytes.lock().expect("nobody panicked").len() as u64)
    }

    fn run_at(&self, _offset: HostOffset, len: u64) -> Result<Run> {
        Ok(Run { kind: RunKind::Data, len })
    }

    fn name(&self) -> String {
        "room".to_owned()
    }

    fn identity(&self) -> StoreIdentity {
        StoreIdentity::own()
    }

    fn reads_unwritten_as_zeros(&self) -> bool {
        true
    }

    fn witness(&self) -> Witness {
        Witness::None
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.len()
    }
}

struct Nothing;

impl Observer for Nothing {
    fn finding(&mut self, finding: Finding) {
        panic!("the check found {finding:?}");
    }
}

/// Everything here is ready at once.
fn run<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("a store of memory never waits"),
    }
}

fn make(wish: &ImageWish, size: u64, image: &Room, data: &Room) -> Result<()> {
    let plan = wish.plan(size).expect("a plan");
    let data = plan.data_file.as_ref().map(|_| data as &dyn Store);
    run(create(plan, Stores { image, data }))
}

#[test]
fn images_of_every_shape_are_whole() {
    let modes = [Preallocation::Off, Preallocation::Metadata, Preallocation::Falloc];
    for preallocation in [modes.as_slice(), &[Preallocation::Full]].concat() {
        for cluster_bytes in [512, 4096, 65536, 2 << 20] {
            for refcount_bits in [1, 16, 64] {
                for extended in [false, true] {
                    if extended && cluster_bytes < 1 << 14 {
                        continue;
                    }
                    let wish = ImageWish {
                        cluster_bytes: Some(cluster_bytes),
                        refcount_bits: Some(refcount_bits),
                        extended_l2: Some(extended),
                        preallocation: Some(preallocation),
                        ..ImageWish::default()
                    };
                    let image = Room::new(usize::MAX);
                    make(&wish, (1 << 20) + 512, &image, &image).expect("there is room");
                    let bytes = image.bytes.lock().expect("nobody panicked").clone();
                    let header = Header::decode(&bytes, bytes.len() as u64).expect("a header");
                    assert_eq!(header.size, (1 << 20) + 512);
                    let report = run(check(image, &header, &mut Nothing)).expect("it is checked");
                    let clusters = header.size.div_ceil(cluster_bytes);
                    let wanted = if preallocation == Preallocation::Off { 0 } else { clusters };
                    assert_eq!(report.allocated_clusters, wanted);
                }
            }
        }
    }
}

#[test]
fn a_store_that_fills_up_is_left_without_a_header() {
    let wish = ImageWish { preallocation: Some(Preallocation::Full), ..ImageWish::default() };
    for len_max in [0, 65536, 200_000, 1 << 20] {
        let image = Room::new(len_max);
        let error = make(&wish, 1 << 20, &image, &image).expect_err("there is no room");
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        let bytes = image.bytes.lock().expect("nobody panicked");
        assert!(bytes.iter().take(4).all(|byte| *byte == 0), "no header, so no image");
    }
}

#[test]
fn an_overlay_has_subclusters_of_4_kib_unless_someone_says_otherwise() {
    let overlay = ImageWish {
        backing_name: Some("base".into()),
        backing_format: Some("raw".to_owned()),
        ..ImageWish::default()
    };
    let shape = |wish: &ImageWish| {
        let l2 = wish.plan(1 << 30).expect("a plan").l2;
        (l2.cluster_bits.bytes(), l2.extended)
    };
    assert_eq!(shape(&overlay), (128 << 10, true));
    assert_eq!(shape(&ImageWish::default()), (64 << 10, false));
    let stated = ImageWish { cluster_bytes: Some(64 << 10), ..overlay.clone() };
    assert_eq!(shape(&stated), (64 << 10, true));
    let small = ImageWish { cluster_bytes: Some(4 << 10), ..overlay.clone() };
    assert_eq!(shape(&small), (4 << 10, false));
    let plain = ImageWish { extended_l2: Some(false), ..overlay.clone() };
    assert_eq!(shape(&plain), (64 << 10, false));
    let old = ImageWish { version: Some(Version::V2), ..overlay };
    assert_eq!(shape(&old), (64 << 10, false));
}

#[test]
fn what_does_not_go_together_is_refused() {
    let refused = |wish: ImageWish| wish.plan(1 << 30).expect_err("refused").to_string();
    let v2 = ImageWish { version: Some(Version::V2), ..ImageWish::default() };
    let zstd = Some(Compression::Zstd);
    assert!(refused(ImageWish { compression: zstd, ..v2.clone() }).contains("Non-zlib"));
    assert!(refused(ImageWish { extended_l2: Some(true), ..v2 }).contains("Extended L2"));
    let overlay = ImageWish { backing_name: Some("base".into()), ..ImageWish::default() };
    assert!(refused(overlay).contains("without backing format"));
    let raw = ImageWish { data_file_raw: true, ..ImageWish::default() };
    assert!(refused(raw).contains("requires data-file"));
    assert!(ImageWish::default().plan(u64::MAX).is_err());
}
