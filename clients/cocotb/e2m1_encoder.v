// A float32 to its E2M1 code: nearest even, saturating, NaN to 7, the sign of zero kept.
// Magnitudes of floats are ordered as their bits are, so each midpoint is one comparison.
module e2m1_encoder (
    input  wire [31:0] x,
    output wire [ 3:0] code
);
    wire [30:0] magnitude = x[30:0];
    wire        nan       = magnitude > 31'h7F800000;
    wire [ 2:0] index     = {2'b0, magnitude >  31'h3E800000}   // 0.25: a tie goes to the even code
                          + {2'b0, magnitude >= 31'h3F400000}   // 0.75
                          + {2'b0, magnitude >  31'h3FA00000}   // 1.25
                          + {2'b0, magnitude >= 31'h3FE00000}   // 1.75
                          + {2'b0, magnitude >  31'h40200000}   // 2.5
                          + {2'b0, magnitude >= 31'h40600000}   // 3.5
                          + {2'b0, magnitude >  31'h40A00000};  // 5
    assign code = nan ? 4'h7 : {x[31], index};
endmodule
