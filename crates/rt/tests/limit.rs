//! Writes that the system cuts short, by the limit of the length of files. A binary of its own: the
//! limit is the process's.

use mica_rt::{Access, Backend, Buf, Executor, File, write_at};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::Arc;

#[test]
fn short_write_continues_until_the_system_reports_the_reason() {
    // SAFETY: no handler is set, only the default one taken away.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let made = tempfile::NamedTempFile::new().unwrap();
    let hard = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: Some(10_000), maximum: hard }).unwrap();
    for backend in [Backend::Uring, Backend::Pool] {
        let Ok(executor) = Executor::new(backend) else { continue };
        let opened = std::fs::File::options().write(true).open(made.path()).unwrap();
        opened.set_len(0).unwrap();
        let file = Arc::new(File::new(opened.into(), Access::Buffered));
        executor.block_on(async {
            let (result, buf) = write_at(&file, Buf::from_slice(&[7; 12_000]), 4000).await;
            assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EFBIG), "{backend:?}");
            assert_eq!(buf.len(), 12_000);
        });
        let there = std::fs::read(made.path()).unwrap();
        assert_eq!(there.len(), 10_000, "what fits is written");
        assert!(there[4000..].iter().all(|byte| *byte == 7));
    }
}
