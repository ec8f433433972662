//! Rings restricted to the operations that they are for.

use io_uring::IoUring;
use io_uring::register::Restriction;
use std::io;

/// Enables a `ring` that was created disabled, for these operations and these register opcodes
/// only. Nobody can change that afterwards.
///
/// # Errors
/// Any error of the system.
pub(crate) fn enable(ring: &IoUring, operations: &[u8], registers: &[u8]) -> io::Result<()> {
    let operations = operations.iter().map(|code| Restriction::sqe_op(*code));
    let registers = registers.iter().map(|code| Restriction::register_op(*code));
    let mut all: Vec<_> = operations.chain(registers).collect();
    let submitter = ring.submitter();
    submitter.register_restrictions(&mut all)?;
    submitter.register_enable_rings()
}

#[cfg(test)]
mod tests {
    use super::*;
    use io_uring::{opcode, squeue, types};

    fn outcome(ring: &mut IoUring, entry: &squeue::Entry) -> i32 {
        // SAFETY: the entries of this test name no memory.
        unsafe { ring.submission().push(entry) }.expect("there is room");
        ring.submit_and_wait(1).expect("submitted");
        ring.completion().next().expect("completed").result()
    }

    #[test]
    fn ring_does_what_it_was_enabled_for_and_nothing_else() {
        let mut ring = match IoUring::builder().setup_r_disabled().build(2) {
            Ok(ring) => ring,
            Err(error) => return println!("SKIPPED: no io_uring ({error})"),
        };
        enable(&ring, &[opcode::Nop::CODE], &[]).expect("enabled");
        let nop = opcode::Nop::new().build();
        assert_eq!(outcome(&mut ring, &nop), 0);
        let socket = opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build();
        assert_eq!(outcome(&mut ring, &socket), -libc::EACCES);
        let asynchronous = opcode::Nop::new().build().flags(squeue::Flags::ASYNC);
        assert_eq!(outcome(&mut ring, &asynchronous), -libc::EACCES);
        let close = opcode::Close::new(types::Fd(-1)).build();
        assert_eq!(outcome(&mut ring, &close), -libc::EACCES);
        assert!(ring.submitter().register_files(&[0]).is_err());
        assert!(enable(&ring, &[opcode::Socket::CODE], &[]).is_err(), "once and for all");
    }
}
