use super::*;
use std::io;

fn string(bytes: &[u8]) -> Vec<u8> {
    let mut out = u32::try_from(bytes.len()).expect("short").to_be_bytes().to_vec();
    out.extend(bytes);
    out
}

#[test]
fn greeting_is_fixed_newstyle_without_zeroes() {
    assert_eq!(greeting(), *b"NBDMAGICIHAVEOPT\x00\x03");
}

#[test]
fn unknown_client_flags_are_refused() {
    assert_eq!(decode_client_flags([0, 0, 0, 3]), Ok(3));
    assert_eq!(decode_client_flags([0, 0, 0, 4]), Err(Malformed));
    assert_eq!(decode_client_flags([0, 1, 0, 3]), Err(Malformed));
}

#[test]
fn option_header_needs_its_magic() {
    let good = *b"IHAVEOPT\x00\x00\x00\x07\xff\xff\xff\xff";
    assert_eq!(OptionHeader::decode(&good), Ok(OptionHeader { option: 7, len: u32::MAX }));
    let mut bad = good;
    bad[0] = b'i';
    assert_eq!(OptionHeader::decode(&bad), Err(Malformed));
}

#[test]
fn info_request_is_taken_to_the_byte() {
    let mut data = string(b"disk");
    data.extend([0, 2, 0, 3, 0, 1]);
    let request = InfoRequest::decode(&data).expect("well formed");
    assert_eq!(request.name, b"disk");
    assert!(request.asks_for(info::BLOCK_SIZE));
    assert!(request.asks_for(info::NAME));
    assert!(!request.asks_for(info::DESCRIPTION));

    for shorter in 0..data.len() {
        assert_eq!(InfoRequest::decode(&data[..shorter]), Err(Malformed), "{shorter} bytes");
    }
    data.push(0);
    assert_eq!(InfoRequest::decode(&data), Err(Malformed));
}

#[test]
fn lengths_beyond_the_data_are_malformed() {
    // CVE-2022-26495 and 26496.
    assert_eq!(InfoRequest::decode(b"\xff\xff\xff\xffname\x00\x00"), Err(Malformed));
    assert_eq!(MetaRequest::decode(b"\xff\xff\xff\xffname\x00\x00\x00\x00"), Err(Malformed));
    assert_eq!(InfoRequest::decode(b"\x00\x00\x00\x00\xff\xff"), Err(Malformed));
    assert_eq!(MetaRequest::decode(b"\x00\x00\x00\x00\xff\xff\xff\xff"), Err(Malformed));
}

#[test]
fn name_of_4096_bytes_fits_and_of_4097_does_not() {
    for (len, fits) in [(4096, true), (4097, false)] {
        let mut data = string(&vec![b'n'; len]);
        data.extend([0, 0]);
        assert_eq!(InfoRequest::decode(&data).is_ok(), fits, "{len} bytes");
    }
}

#[test]
fn meta_request_is_taken_to_the_byte() {
    let mut data = string(b"disk");
    data.extend([0, 0, 0, 2]);
    data.extend(string(b"base:"));
    data.extend(string(b"x-y:z"));
    let request = MetaRequest::decode(&data).expect("well formed");
    assert_eq!(request.queries, [&b"base:"[..], b"x-y:z"]);

    for shorter in 0..data.len() {
        assert_eq!(MetaRequest::decode(&data[..shorter]), Err(Malformed), "{shorter} bytes");
    }
    data.push(0);
    assert_eq!(MetaRequest::decode(&data), Err(Malformed));
}

#[test]
fn request_is_decoded_field_by_field() {
    let mut bytes = [0_u8; Request::BYTES];
    bytes[..8].copy_from_slice(&[0x25, 0x60, 0x95, 0x13, 0, 8, 0, 7]);
    bytes[8..16].copy_from_slice(&0x0102_0304_0506_0708_u64.to_be_bytes());
    bytes[16..24].copy_from_slice(&u64::MAX.to_be_bytes());
    bytes[24..].copy_from_slice(&u32::MAX.to_be_bytes());
    let request = Request {
        flags: command_flag::REQ_ONE,
        command: command::BLOCK_STATUS,
        cookie: 0x0102_0304_0506_0708,
        offset: u64::MAX,
        len: u32::MAX,
    };
    assert_eq!(Request::decode(&bytes), Ok(request));
    bytes[3] ^= 1;
    assert_eq!(Request::decode(&bytes), Err(Malformed));
}

#[test]
fn only_writes_carry_a_payload() {
    let mut request = Request { flags: 0, command: command::WRITE, cookie: 0, offset: 0, len: 9 };
    assert_eq!(request.payload_len(), 9);
    for other in (0..20).filter(|other| *other != command::WRITE) {
        request.command = other;
        assert_eq!(request.payload_len(), 0);
    }
}

#[test]
fn chunk_lengths_count_what_follows_the_header() {
    let len_of = |bytes: &[u8]| u32::from_be_bytes(bytes[16..20].try_into().expect("4 bytes"));
    assert_eq!(len_of(&chunk_none(1)), 0);
    assert_eq!(len_of(&chunk_data(Done::Yes, 1, 0, 512)), 8 + 512);
    assert_eq!(len_of(&chunk_hole(Done::No, 1, 0, 512)), 12);
    assert_eq!(len_of(&chunk_status(Done::Yes, 1, 1, 3)), 4 + 3 * 8);
    for offset in [None, Some(7)] {
        let chunk = chunk_error(1, ErrorCode::Io, offset);
        assert_eq!(len_of(&chunk) as usize, chunk.len() - CHUNK_HEADER_BYTES);
    }
}

#[test]
fn every_error_of_the_disk_has_a_code_of_the_protocol() {
    let kinds = [
        (ErrorKind::Invalid, ErrorCode::Inval),
        (ErrorKind::Unsupported, ErrorCode::Io),
        (ErrorKind::Corrupt, ErrorCode::Io),
        (ErrorKind::NotFound, ErrorCode::Io),
        (ErrorKind::Denied, ErrorCode::Perm),
        (ErrorKind::Limit, ErrorCode::Inval),
        (ErrorKind::NoSpace, ErrorCode::NoSpc),
        (ErrorKind::Io, ErrorCode::Io),
    ];
    for (kind, code) in kinds {
        assert_eq!(ErrorCode::of(&Error::new(kind, "")), code);
    }
    for (errno, code) in [
        (12, ErrorCode::NoMem),
        (28, ErrorCode::NoSpc),
        (122, ErrorCode::NoSpc),
        (5, ErrorCode::Io),
    ] {
        let error = Error::from_io("", io::Error::from_raw_os_error(errno));
        assert_eq!(ErrorCode::of(&error.wrap("wrapped")), code, "errno {errno}");
    }
}
